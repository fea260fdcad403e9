/* The Python module: which operations this machine has, and running them on several threads.
 *
 * Threads are torch's own where it brings an OpenMP runtime, whose entry point Python hands over: a second pool would fight
 * with the first one for the cores. Elsewhere threads are started for each call. */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "kvant.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

typedef void (*Task)(const void *, int64_t, float *);
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */

#define PHASES 3

/* Phases of tasks, one after another. A thread that comes late finds less to do; nobody waits for one that has no task. */
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

static void find(void) {
  if (known) return;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    all[known++] = &KVANT_AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) all[known++] = &KVANT_AVX2;
#elif defined(__aarch64__)
#if defined(__linux__)
  if (getauxval(AT_HWCAP) & 1 << 20) all[known++] = &KVANT_NEON; /* HWCAP_ASIMDDP */
#else
  all[known++] = &KVANT_NEON; /* every Mac has it */
#endif
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
  return Py_BuildValue("nnnn", (Py_ssize_t)sizeof(Stream), (Py_ssize_t)sizeof(Decode), (Py_ssize_t)sizeof(Append),
                       (Py_ssize_t)sizeof(Read));
}

static PyObject *sources(PyObject *self, PyObject *args) {
  (void)self;
  if (!PyArg_ParseTuple(args, "")) return NULL;
  return PyUnicode_FromString(KVANT_SOURCES);
}

/* (address of the call, kind, threads, GOMP_parallel or 0, tasks, scratch or 0, floats of scratch for a thread) */
static int parsed(PyObject *args, void **call, const Isa **isa, int *threads, Parallel *parallel, long long *tasks, float **scratch,
                  long long *stride) {
  unsigned long long call_at, parallel_at, scratch_at;
  int kind;
  find();
  if (!PyArg_ParseTuple(args, "KiiKLKL", &call_at, &kind, threads, &parallel_at, tasks, &scratch_at, stride)) return 0;
  if (kind < 0 || kind >= known) {
    PyErr_Format(PyExc_ValueError, "kind must be from 0 to %d, got %d", known - 1, kind);
    return 0;
  }
  *call = (void *)(uintptr_t)call_at;
  *isa = all[kind];
  *parallel = (Parallel)(uintptr_t)parallel_at;
  *scratch = (float *)(uintptr_t)scratch_at;
  return 1;
}

static PyObject *decode(PyObject *self, PyObject *args) {
  (void)self;
  void *data;
  const Isa *isa;
  int threads;
  Parallel parallel;
  long long tasks, stride;
  float *scratch;
  if (!parsed(args, &data, &isa, &threads, &parallel, &tasks, &scratch, &stride)) return NULL;
  const Decode *call = data;
  const int64_t rows = (int64_t)call->batch * call->heads;
  Py_BEGIN_ALLOW_THREADS
  Job job = {call, {(Task)isa->prepare, (Task)isa->split, (Task)isa->merge}, {rows * call->blocks, rows * call->splits, rows},
             stride, scratch, {0}, {0}, 0};
  run(&job, threads, parallel);
  Py_END_ALLOW_THREADS
  return Py_BuildValue("");
}

static PyObject *append(PyObject *self, PyObject *args) {
  (void)self;
  void *data;
  const Isa *isa;
  int threads;
  Parallel parallel;
  long long tasks, stride;
  float *scratch;
  if (!parsed(args, &data, &isa, &threads, &parallel, &tasks, &scratch, &stride)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  const Append *call = data;
  const int grouped = call->key.group_tokens > 1 || call->value.group_tokens > 1;
  Job job = {call, {(Task)isa->append, (Task)isa->append_groups}, {tasks, grouped ? (int64_t)call->batch * call->heads * 2 : 0},
             stride, scratch, {0}, {0}, 0};
  run(&job, threads, parallel);
  Py_END_ALLOW_THREADS
  return Py_BuildValue("");
}

static PyObject *read_rows(PyObject *self, PyObject *args) {
  (void)self;
  void *data;
  const Isa *isa;
  int threads;
  Parallel parallel;
  long long tasks, stride;
  float *scratch;
  if (!parsed(args, &data, &isa, &threads, &parallel, &tasks, &scratch, &stride)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  Job job = {data, {(Task)isa->read}, {tasks}, stride, scratch, {0}, {0}, 0};
  run(&job, threads, parallel);
  Py_END_ALLOW_THREADS
  return Py_BuildValue("");
}

static PyMethodDef methods[] = {
    {"kinds", kinds, METH_VARARGS, "Names of the instruction sets that this machine can run, best first."},
    {"sizes", sizes, METH_VARARGS, "Bytes of Stream, Decode, Append and Read."},
    {"sources", sources, METH_VARARGS, "Digest of the files that this was compiled from."},
    {"decode", decode, METH_VARARGS, "Runs a Decode."},
    {"append", append, METH_VARARGS, "Runs an Append."},
    {"read", read_rows, METH_VARARGS, "Runs a Read."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
