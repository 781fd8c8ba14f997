// A weight as the forward pass reads it: packed once, then streamed.
//
//   panel p: outputs [32 p, 32 p + 32)          a step: 128 bytes
//   |-- step 0 --|-- step 1 --| … |-- in --|    32 items, one for each output
//
// An item is 32 bits: one float32, or two neighbouring bf16 of a row. So a panel is one run
// of bytes, read in order whatever the number of rows, and one output's sum runs over `in`
// in an order that depends on `in` alone. models/fused/packing.py lays weights out so.
//
// Weights of eight or four bits lie in groups of 32 inputs, in the same order of items:
//   |-- 32 scales --|-- 32 minima, of int4 --|-- numbers --|    scales and minima in half precision
//   int8: number n of a step's 32 items is one signed byte; weight = scale · byte
//   int4:  number n of four steps is 16 bits, four for each; weight = scale · bits + minimum
#pragma once
#include <cstdint>

#include "attention/views.h"

namespace kvell {

constexpr int64_t kPanel = 32;
constexpr int64_t kStepBytes = kPanel * 4;

constexpr int64_t kGroup = 32;  // inputs that share a scale

enum class Form : int { plain = 0, int8 = 1, int4 = 2 };

constexpr int64_t scales_bytes(Form form) { return kPanel * (form == Form::int4 ? 4 : 2); }
constexpr int64_t group_bytes(Form form) {
  return scales_bytes(form) + kGroup * kPanel / (form == Form::int4 ? 2 : 1);
}

struct Matrix {
  const uint8_t* data;
  const float* bias;  // [panels · 32] or null
  int64_t out;
  int64_t steps;  // items of a row
  Form form;
  int64_t groups;  // of a row; 0 of plain weights
  const float* factors;  // [panels · 32], of sums before the bias, or null

  int64_t panels() const { return (out + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const {
    return form == Form::plain ? steps * kStepBytes : groups * group_bytes(form);
  }
  const uint8_t* panel(int64_t index) const { return data + index * panel_bytes(); }
};

// RMS norm; without a weight there is none.
struct Norm {
  const float* weight;
  float epsilon;
  explicit operator bool() const { return weight != nullptr; }
};

enum class Activation : int { silu = 0, gelu_tanh = 1 };

// What becomes of a row's 32 sums.
enum class Goal : int {
  store,  // y[column] = sum, float32, capped if softcap > 0
  add,    // y[column] += factor · sum, float32
  gate,   // panels hold 16 gates, then their 16 ups: y[16 panel + i] = act(gate) · up, as elements
};

struct Finish {
  Goal goal;
  void* y;
  int64_t y_stride;  // in numbers of y
  float factor = 1.0f;
  float softcap = 0.0f;
};

// y = finish(x · Wᵀ · factors + bias)
struct Product {
  const Matrix* matrix;
  const uint32_t* x;  // items
  int64_t x_stride;   // in items
  int64_t rows;
  Finish finish;
};

}  // namespace kvell
