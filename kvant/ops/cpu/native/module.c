/* The Python module: lists the instruction sets of this machine, and runs operations on several threads.
 *
 * Where torch has an OpenMP runtime, Python passes the address of its GOMP_parallel and its threads are used: a second thread pool
 * would compete with them for the cores. Elsewhere every call starts threads. */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "kvant.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

typedef void (*Task)(const void *, int64_t, float *);
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */

#define PHASES 3

/* A call's tasks, in phases: a phase starts when all tasks of the phase before it are done. Threads take tasks from a shared
 * counter. */
typedef struct {
  const void *call;
  Task run[PHASES];
  int64_t tasks[PHASES], scratch_stride;
  float *scratch;
  atomic_llong next[PHASES], done[PHASES];
  atomic_int threads;
} Job;

static void work(void *data) {
  Job *job = data;
  float *scratch = job->scratch + atomic_fetch_add(&job->threads, 1) * job->scratch_stride;
  for (int phase = 0; phase < PHASES; phase++) {
    const int64_t tasks = job->tasks[phase];
    for (int64_t task; (task = atomic_fetch_add(&job->next[phase], 1)) < tasks; atomic_fetch_add(&job->done[phase], 1))
      job->run[phase](job->call, task, scratch);
    if (phase + 1 < PHASES && job->tasks[phase + 1])
      for (int spins = 0; atomic_load(&job->done[phase]) < tasks; spins++)
        if (spins > 10000) sched_yield();
  }
}

static void *work_thread(void *data) {
  work(data);
  return NULL;
}

static void run(Job *job, int threads, Parallel parallel) {
  int64_t most = 1;
  for (int phase = 0; phase < PHASES; phase++) most = job->tasks[phase] > most ? job->tasks[phase] : most;
  if (threads > most) threads = (int)most;
  if (threads <= 1) {
    work(job);
  } else if (parallel) {
    parallel(work, job, (unsigned)threads, 0);
  } else {
    pthread_t started[64];
    int count = 0;
    for (; count < threads - 1 && count < 64; count++)
      if (pthread_create(&started[count], NULL, work_thread, job)) break;
    work(job);
    while (count) pthread_join(started[--count], NULL);
  }
}

static const Isa *all[4];
static int known;

#if defined(__aarch64__)
#if defined(__linux__)
static int has_dot_products(void) { return (getauxval(AT_HWCAP) & 1 << 20) != 0; }     /* HWCAP_ASIMDDP */
static int has_matrix_products(void) { return (getauxval(AT_HWCAP2) & 1 << 13) != 0; } /* HWCAP2_I8MM */
#elif defined(__APPLE__)
static int has_dot_products(void) { return 1; } /* every Mac has them */
static int has_matrix_products(void) {
  int found = 0;
  size_t size = sizeof found;
  return !sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, NULL, 0) && found;
}
#else
static int has_dot_products(void) { return 0; }
static int has_matrix_products(void) { return 0; }
#endif
#endif

/* Fills `all` with the instruction sets that this CPU can run, best first. */
static void find(void) {
  if (known) return;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    all[known++] = &KVANT_AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) all[known++] = &KVANT_AVX2;
#elif defined(__aarch64__)
#if defined(KVANT_HAS_I8MM)
  if (has_dot_products() && has_matrix_products()) {
    static Isa i8mm;
    i8mm = KVANT_I8MM;
    i8mm.check = KVANT_NEON.check, i8mm.append = KVANT_NEON.append, i8mm.append_groups = KVANT_NEON.append_groups;
    all[known++] = &i8mm;
  }
#endif
  if (has_dot_products()) all[known++] = &KVANT_NEON;
#endif
  all[known++] = &KVANT_GENERIC;
}

static PyObject *kinds(PyObject *self, PyObject *args) {
  (void)self;
  if (!PyArg_ParseTuple(args, "")) return NULL;
  find();
  PyObject *out = PyList_New(0);
  for (int i = 0; out && i < known; i++) {
    PyObject *name = PyUnicode_FromString(all[i]->name);
    if (!name || PyList_Append(out, name)) {
      Py_XDECREF(name);
      Py_DECREF(out);
      return NULL;
    }
    Py_DECREF(name);
  }
  return out;
}

static PyObject *sizes(PyObject *self, PyObject *args) {
  (void)self;
  if (!PyArg_ParseTuple(args, "")) return NULL;
  return Py_BuildValue("nnnnn", (Py_ssize_t)sizeof(Stream), (Py_ssize_t)sizeof(Batch), (Py_ssize_t)sizeof(Decode),
                       (Py_ssize_t)sizeof(Append), (Py_ssize_t)sizeof(Read));
}

static PyObject *sources(PyObject *self, PyObject *args) {
  (void)self;
  if (!PyArg_ParseTuple(args, "")) return NULL;
  return PyUnicode_FromString(KVANT_SOURCES);
}

/* The arguments that Python passes: address of the structure (Decode, Append or Read), index of the instruction set, threads,
 * address of GOMP_parallel or 0, number of tasks, address of the scratch memory or 0, floats of scratch per thread. */
typedef struct {
  void *call;
  const Isa *isa;
  int threads;
  Parallel parallel;
  int64_t tasks, stride;
  float *scratch;
} Arguments;

static int parsed(PyObject *args, Arguments *out) {
  unsigned long long call, parallel, scratch;
  long long tasks, stride;
  int kind;
  find();
  if (!PyArg_ParseTuple(args, "KiiKLKL", &call, &kind, &out->threads, &parallel, &tasks, &scratch, &stride)) return 0;
  if (kind < 0 || kind >= known) {
    PyErr_Format(PyExc_ValueError, "kind must be from 0 to %d, got %d", known - 1, kind);
    return 0;
  }
  out->call = (void *)(uintptr_t)call;
  out->isa = all[kind];
  out->parallel = (Parallel)(uintptr_t)parallel;
  out->tasks = tasks;
  out->stride = stride;
  out->scratch = (float *)(uintptr_t)scratch;
  return 1;
}

/* Sets the phases of a job. */
typedef void (*Plan)(const Arguments *, Job *);

static PyObject *planned(PyObject *args, Plan plan) {
  Arguments given;
  if (!parsed(args, &given)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  Job job = {.call = given.call, .scratch = given.scratch, .scratch_stride = given.stride};
  plan(&given, &job);
  run(&job, given.threads, given.parallel);
  Py_END_ALLOW_THREADS
  return Py_BuildValue("");
}

static void add_phase(Job *job, int phase, Task task, int64_t tasks) {
  job->run[phase] = task;
  job->tasks[phase] = tasks;
}

/* Sets the pointers of the streams to the overlays and ring starts of this call. */
static void set_overlays(Stream *key, Stream *value, void *const *overlay, const Batch *batch) {
  key->overlay = overlay[0], value->overlay = overlay[1];
  key->ring_start = batch->ring_start[0], value->ring_start = batch->ring_start[1];
}

static void plan_decode(const Arguments *given, Job *job) {
  Decode *call = given->call;
  set_overlays(&call->key, &call->value, call->overlay, call->batch);
  const int64_t rows = call->batch->count * call->heads;
  add_phase(job, 0, (Task)given->isa->prepare, call->rope_block ? 0 : rows); /* with RoPE blocks every split computes its operands */
  add_phase(job, 1, (Task)given->isa->split, rows * call->splits);
  add_phase(job, 2, (Task)given->isa->merge, rows);
}

/* Whether a sequence has a token in a RoPE block beyond the end of the table of angles. */
static int rope_table_too_short(const Append *call) {
  const FusedTransform *transform = &call->key_transform;
  for (int64_t b = 0; transform->rope_block && b < call->batch->count; b++)
    if ((call->batch->seq_lens[b] - 1 + transform->rope_first) / transform->rope_block - transform->rope_first / transform->rope_block >= transform->rope_blocks) return 1;
  return 0;
}

static void plan_append(const Arguments *given, Job *job) {
  Append *call = given->call;
  const int grouped = call->key.group_tokens > 1 || call->value.group_tokens > 1, checked = call->limit < INFINITY;
  set_overlays(&call->key, &call->value, call->overlay, call->batch);
  call->refused = rope_table_too_short(call) ? 2 : 0;
  if (call->refused) return;
  add_phase(job, 0, (Task)given->isa->check, checked ? (call->tokens + CHECKED - 1) / CHECKED : 0);
  add_phase(job, 1, (Task)given->isa->append, given->tasks);
  add_phase(job, 2, (Task)given->isa->append_groups, grouped ? call->batch->count * call->heads * 2 : 0);
}

static void plan_read(const Arguments *given, Job *job) { add_phase(job, 0, (Task)given->isa->read, given->tasks); }

static PyObject *decode(PyObject *self, PyObject *args) { return (void)self, planned(args, plan_decode); }
static PyObject *append(PyObject *self, PyObject *args) { return (void)self, planned(args, plan_append); }
static PyObject *read_rows(PyObject *self, PyObject *args) { return (void)self, planned(args, plan_read); }

static PyMethodDef methods[] = {
    {"kinds", kinds, METH_VARARGS, "Names of the instruction sets that this machine can run, best first."},
    {"sizes", sizes, METH_VARARGS, "Bytes of Stream, Batch, Decode, Append and Read."},
    {"sources", sources, METH_VARARGS, "Digest of the files that this was compiled from."},
    {"decode", decode, METH_VARARGS, "Runs a Decode."},
    {"append", append, METH_VARARGS, "Runs an Append."},
    {"read", read_rows, METH_VARARGS, "Runs a Read."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
