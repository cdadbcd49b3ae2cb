// What the target predicted after each token, as successors.py has it.

#pragma once

#include "native.h"

#define KEPT 12  // as in successors.py

typedef struct {
    int32_t *slots, *seen, *names;  // [known] where a token's rows are, or -1; [rows]; [rows, KEPT], the end is -1
    double *probs;                  // [rows, KEPT]
    int64_t known, rows;            // tokens; rows that are in use
} Table;
