/* Runs one decode call on ARM; scripts/arm_counts.py writes the call as data and links it. Without arguments it runs all of the call
 * and prints the relative difference from the output of the machine that wrote it; with the number of a split that split alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "kvant.h"

extern Decode call;
extern float *scratch;
extern const float want[]; /* [heads * group, dim] */

int main(int argc, char **argv) {
  const Batch *batch = call.batch;
  call.key.overlay = call.overlay[0], call.value.overlay = call.overlay[1]; /* as module.c does */
  call.key.ring_start = batch->ring_start[0], call.value.ring_start = batch->ring_start[1];
  for (int task = 0; task < call.heads && !call.rope_block; task++) ISA.prepare(&call, task, scratch);
  if (argc > 1) {
    ISA.split(&call, atoi(argv[1]), scratch);
    return 0;
  }
  for (int task = 0; task < call.heads * call.splits; task++) ISA.split(&call, task, scratch);
  for (int task = 0; task < call.heads; task++) ISA.merge(&call, task, scratch);
  const float *out = call.out;
  double error = 0.0, norm = 0.0;
  for (int i = 0; i < call.heads * call.group * call.dim; i++) {
    error += ((double)out[i] - want[i]) * ((double)out[i] - want[i]);
    norm += (double)want[i] * want[i];
  }
  printf("%.3e\n", sqrt(error / norm));
  return 0;
}
