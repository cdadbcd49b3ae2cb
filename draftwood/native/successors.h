// What the target said follows each token, as successors.py has it.

#pragma once

#include "native.h"

typedef struct {
    int32_t *slots, *seen, *names;  // [known] where a token's rows are, or -1; [rows]; [rows, kept], the end is -1
    double *probs;                  // [rows, kept]
    int64_t known, kept, rows;      // tokens; successors of each; those that are there
} Table;
