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

#if defined(__CUDACC__)
#define FUSEDSHARD_HD __host__ __device__ __forceinline__
#else
#define FUSEDSHARD_HD inline __attribute__((always_inline))
#endif

namespace fusedshard {

// Hyperparameters of one param group, as the user gave them.
struct Group {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled;  // true: AdamW decays the weight; false: Adam adds wd * p to the gradient
  bool amsgrad;
  bool maximize;
};

// One rounding from double to T each; see adam_scalars.
template <typename T>
struct AdamScalars {
  T grad_scale;
  T decay;  // decays_weight(): 1 - lr*wd, multiplies p; otherwise wd, multiplies p into g
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

// Without decay Adam runs AdamW's code with a factor of exactly 1: adding 0 * p to the gradient
// would turn an infinite weight into a NaN gradient.
FUSEDSHARD_HD bool decays_weight(const Group& group) {
  return group.decoupled || group.weight_decay == 0.0;
}

// step counts from 1: the value after this update.
template <typename T>
FUSEDSHARD_HD AdamScalars<T> adam_scalars(const Group& group, int64_t step, double grad_scale) {
  const double bias_correction1 = 1.0 - integer_power(group.beta1, step);
  const double bias_correction2 = 1.0 - integer_power(group.beta2, step);
  AdamScalars<T> s;
  s.grad_scale = static_cast<T>(grad_scale);
  s.decay = static_cast<T>(decays_weight(group) ? 1.0 - group.lr * group.weight_decay
                                                : group.weight_decay);
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

// Decoupled weight decay: Loshchilov & Hutter, "Decoupled Weight Decay Regularization"
// (arXiv:1711.05101), algorithm 2. Coupled: Kingma & Ba, "Adam" (arXiv:1412.6980), algorithm 1.
// The order of operations is torch.optim's. `vmax` is read and written only with amsgrad.
template <typename T, bool kDecoupled, bool kAmsgrad, bool kMaximize>
FUSEDSHARD_HD void adam_element(T& p, T g, T& m, T& v, T* vmax, const AdamScalars<T>& s) {
  g *= s.grad_scale;
  if (kMaximize) g = -g;
  if (kDecoupled) {
    p *= s.decay;
  } else {
    g += s.decay * p;
  }
  m = (s.from_gradient ? g : m) + s.exp_avg_weight * (g - m);
  v = s.beta2 * v + s.one_minus_beta2 * g * g;
  T second = v;
  if (kAmsgrad) {
    // A NaN on either side stays, as in torch.maximum.
    second = (v > *vmax || v != v) ? v : *vmax;
    *vmax = second;
  }
  p -= s.step_size * m / (square_root(second) / s.sqrt_bias_correction2 + s.eps);
}

}  // namespace
}  // namespace fusedshard
