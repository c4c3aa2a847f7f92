// The update of one element, and the scalars it needs.
//
// This header is the only place that knows the arithmetic. It is compiled once for every CPU
// instruction set and once by nvcc, always without contraction into FMA, so that all of them
// give the same bits. Its functions live in an anonymous namespace: a function with external
// linkage that was compiled for AVX-512 could be merged by the linker with its baseline twin and
// then run on a processor without AVX-512.
#pragma once

#include <cmath>
#include <cstdint>

#include "numbers.h"

namespace fusedshard {

// Hyperparameters of one param group, as the user gave them. The layout is fixed, since Python
// hands groups over as an array of doubles (n, 8): the last three are 0 or 1.
struct Group {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double decoupled;  // 1: AdamW decays the weight; 0: Adam adds wd * p to the gradient
  double amsgrad;
  double maximize;
};

// One rounding from double to T each; see adam_scalars.
template <typename T>
struct AdamScalars {
  T grad_scale;        // negative with maximize
  bool decays_weight;  // whether `decay` is 1 - lr*wd and multiplies p, or wd, and g += wd * p
  T decay;
  // exp_avg moves from one end towards the gradient or back from it, as torch.lerp does: from the
  // nearer end, so that beta1 = 0 gives the gradient itself.
  bool from_gradient;
  T exp_avg_weight;  // from exp_avg: 1 - beta1; from the gradient: -beta1
  T beta2;
  T one_minus_beta2;
  T step_size;              // lr / (1 - beta1^step)
  T sqrt_bias_correction2;  // sqrt(1 - beta2^step)
  T eps;
};

namespace {

// Square-and-multiply rather than pow(): libm and CUDA's pow differ in the last bit.
FUSEDSHARD_HD double integer_power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

// step counts from 1: the value after this update.
template <typename T>
FUSEDSHARD_HD AdamScalars<T> adam_scalars(const Group& group, int64_t step, double grad_scale) {
  const double bias_correction1 = 1.0 - integer_power(group.beta1, step);
  const double bias_correction2 = 1.0 - integer_power(group.beta2, step);
  AdamScalars<T> s;
  s.grad_scale = static_cast<T>(group.maximize != 0.0 ? -grad_scale : grad_scale);
  // Without decay Adam does as AdamW, with a factor of exactly 1: adding 0 * p to the gradient
  // would turn an infinite weight into a NaN gradient.
  s.decays_weight = group.decoupled != 0.0 || group.weight_decay == 0.0;
  s.decay =
      static_cast<T>(s.decays_weight ? 1.0 - group.lr * group.weight_decay : group.weight_decay);
  const T weight = static_cast<T>(1.0 - group.beta1);
  s.from_gradient = weight >= T(0.5);
  s.exp_avg_weight = s.from_gradient ? weight - T(1) : weight;
  s.beta2 = static_cast<T>(group.beta2);
  s.one_minus_beta2 = static_cast<T>(1.0 - group.beta2);
  s.step_size = static_cast<T>(group.lr / bias_correction1);
  s.sqrt_bias_correction2 = static_cast<T>(sqrt(bias_correction2));
  s.eps = static_cast<T>(group.eps);
  return s;
}

FUSEDSHARD_HD float square_root(float x) { return sqrtf(x); }
FUSEDSHARD_HD double square_root(double x) { return sqrt(x); }

// The update in two halves, so that a kernel that holds several elements in registers needs none
// for gradients while it divides. The order of operations is torch.optim's.
//
// Decoupled weight decay: Loshchilov & Hutter, "Decoupled Weight Decay Regularization"
// (arXiv:1711.05101), algorithm 2. Coupled: Kingma & Ba, "Adam" (arXiv:1412.6980), algorithm 1.
template <typename T>
FUSEDSHARD_HD void adam_decay_and_moments(T& p, T g, T& m, T& v, const AdamScalars<T>& s) {
  g *= s.grad_scale;
  const T decayed = s.decay * p;
  p = s.decays_weight ? decayed : p;
  g = s.decays_weight ? g : g + decayed;
  m = (s.from_gradient ? g : m) + s.exp_avg_weight * (g - m);
  v = s.beta2 * v + s.one_minus_beta2 * g * g;
}

// amsgrad's second moment; a NaN on either side stays, as in torch.maximum.
template <typename T>
FUSEDSHARD_HD T adam_maximum(T vmax, T v) {
  return (v > vmax || v != v) ? v : vmax;
}

// `second`: v, or with amsgrad its maximum.
template <typename T>
FUSEDSHARD_HD void adam_move(T& p, T m, T second, const AdamScalars<T>& s) {
  p -= s.step_size * m / (square_root(second) / s.sqrt_bias_correction2 + s.eps);
}

// Without a branch, and true for NaN: infinity minus itself is NaN, which equals nothing.
template <typename T>
FUSEDSHARD_HD bool non_finite(T x) {
  return x - x != T(0);
}

}  // namespace
}  // namespace fusedshard
