// One row against the panels of `gemm_amx.h`, without the matrix unit: it waits for memory alone.
//
// The unit takes a panel's tiles one after the other and multiplies none before it is whole; vectors take their lines in
// whatever order memory gives them. One row leaves vectors the time, and the unit's sums are multiply-adds in a known
// order, so bits are the same:
//
// 1. A line of a tile is a word of each of 16 columns, two values of k: a shift and a mask make them fp32.
// 2. A step adds up the even values' products in k order, and the odd ones', each from zero; the sum of both is added to
//    that of the steps before.
// 3. Lines are asked for twice: of memory long before, to the second cache, where many may wait; and of that one shortly
//    before, to the first, or instructions that wait for lines leave no room to ask for others.
// 4. Subnormals count as zero, and become it: `Flushing`.
// 5. Of several NaNs that of the row goes before a weight's, a new one before that of the sum, the even values' before the
//    odd ones', an earlier step's before a later one's. Operands of instructions stand in this order.
//
// Tests hold it against the unit and against its emulation.
#pragma once

#include "amx_unit.h"
#include "line_rows.h"

namespace baton {

constexpr int64_t kAmxRowAhead = 8;  // steps of a panel that are asked for before they are needed

// A row alone x a panel: sums of its 32 columns. What comes `then` is asked for too, in a panel of kAmxRowAhead steps
// or more from its start; null: it is not known.
void amx_row_sums(const LineRows& row, const char* panel, const char* then, float* sums);

}  // namespace baton
