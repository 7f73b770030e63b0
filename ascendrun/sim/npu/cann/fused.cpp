// The NPU's own operators that ascendrun's programs use, each as the formula it stands for; torch_npu's gradients of
// them stay in use, and call the backward operators here. A wish that the formula does not know is refused, not ignored.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

namespace {

using at::Tensor;
using Numbers = at::OptionalIntArrayRef;
using MaybeTensor = std::optional<Tensor>;

// torch_npu's gradients hand on what was not given as an undefined tensor or an empty list.
bool is_given(const MaybeTensor &tensor) { return tensor && tensor->defined(); }
bool is_given(const Numbers &numbers) { return numbers && !numbers->empty(); }

// A kernel of the device computes in the numbers that it chose; autocast, which is on around it, ends at its door.
struct NoAutocast {
    c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// --- RMSNorm ---

Tensor normed(const Tensor &x, const Tensor &rstd) { return x.to(at::kFloat) * rstd; }

std::tuple<Tensor, Tensor> rms_norm(const Tensor &x, const Tensor &weight, double epsilon) {
    Tensor rstd = at::rsqrt(x.to(at::kFloat).pow(2).mean(-1, true) + epsilon);
    return {normed(x, rstd).to(x.scalar_type()) * weight, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor &dy, const Tensor &x, const Tensor &weight, const Tensor &rstd) {
    Tensor unit = normed(x, rstd), grad = dy.to(at::kFloat), scaled = grad * weight.to(at::kFloat);
    Tensor dx = (scaled - unit * (scaled * unit).mean(-1, true)) * rstd;
    return {dx.to(x.scalar_type()), (grad * unit).reshape({-1, weight.numel()}).sum(0).view_as(weight)};
}

// --- rotary positions ---

Tensor turned(const Tensor &x, bool back) {
    auto halves = x.chunk(2, -1);
    return back ? at::cat({halves[1], -halves[0]}, -1) : at::cat({-halves[1], halves[0]}, -1);
}

Tensor rotary(const Tensor &x, const Tensor &cos, const Tensor &sin, c10::string_view mode, const MaybeTensor &rotate) {
    TORCH_CHECK(mode == "half" && !is_given(rotate), "simulated npu_rotary_mul: only rotary_mode half");
    return x * cos + turned(x, false) * sin;
}

Tensor summed_to(const Tensor &grad, const Tensor &like) { return grad.sum_to_size(like.sizes()); }

std::tuple<Tensor, Tensor, Tensor> rotary_backward(const Tensor &dy, const Tensor &x, const Tensor &cos, const Tensor &sin, c10::string_view) {
    return {dy * cos + turned(dy * sin, true), summed_to(dy * x, cos), summed_to(dy * turned(x, false), sin)};
}

// --- SwiGLU ---

Tensor swiglu(const Tensor &x, int64_t dim) {
    auto halves = x.chunk(2, dim);
    return at::silu(halves[0]) * halves[1];
}

Tensor swiglu_backward(const Tensor &dy, const Tensor &x, int64_t dim) {
    auto halves = x.chunk(2, dim);
    Tensor gate = at::sigmoid(halves[0]);
    Tensor d_gate = dy * halves[1] * gate * (1 + halves[0] * (1 - gate));
    return at::cat({d_gate, dy * at::silu(halves[0])}, dim);
}

// --- attention: rows x heads x length x width ---

struct Attention {
    Tensor query, key, value, weights;  // in float; keys and values once for every head of queries
};

Attention attend(const Tensor &q, const Tensor &k, const Tensor &v, c10::string_view layout, const MaybeTensor &hidden, double scale) {
    TORCH_CHECK(layout == "BNSD", "simulated npu_fusion_attention: only input_layout BNSD");
    int64_t shared = q.size(1) / k.size(1);
    Attention made{q.to(at::kFloat), k.to(at::kFloat).repeat_interleave(shared, 1), v.to(at::kFloat).repeat_interleave(shared, 1), {}};
    Tensor scores = at::matmul(made.query, made.key.transpose(-1, -2)) * scale;
    if (is_given(hidden)) scores = scores.masked_fill(*hidden, std::numeric_limits<float>::lowest());
    made.weights = at::softmax(scores, -1);
    return made;
}

// Which weights dropout leaves, enlarged by as much as it takes away; forward and backward draw the same from a seed.
Tensor left_over(const Tensor &weights, double keep, int64_t seed) {
    if (keep == 1.0) return at::ones_like(weights);
    at::Generator chance = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
    Tensor drawn = at::bernoulli(at::full(weights.sizes(), keep, at::dtype(at::kFloat).device(at::kCPU)), chance);
    return drawn.div_(keep).to(weights.device());
}

int64_t drawn_seed(double keep) {
    return keep == 1.0 ? 0 : at::randint(std::numeric_limits<int32_t>::max(), {1}, at::dtype(at::kLong).device(at::kCPU)).item<int64_t>();
}

void refuse_others(const MaybeTensor &pse, const MaybeTensor &padding, Numbers prefix, Numbers q_len, Numbers k_len, int64_t sparse_mode,
                   const MaybeTensor &sink) {
    TORCH_CHECK(!is_given(pse) && !is_given(padding) && !is_given(prefix) && !is_given(q_len) && !is_given(k_len) && sparse_mode == 0 &&
                    !is_given(sink),
                "simulated npu_fusion_attention: no pse, padding_mask, prefix, actual_seq_len, sparse_mode or sink");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, int64_t> attention(
    const Tensor &q, const Tensor &k, const Tensor &v, int64_t heads, c10::string_view layout, const MaybeTensor &pse,
    const MaybeTensor &padding, const MaybeTensor &hidden, double scale, double keep, int64_t, int64_t, int64_t, Numbers prefix,
    Numbers q_len, Numbers k_len, int64_t sparse_mode, bool, bool, c10::string_view, const MaybeTensor &sink, const MaybeTensor &,
    int64_t, int64_t) {
    NoAutocast here;
    refuse_others(pse, padding, prefix, q_len, k_len, sparse_mode, sink);
    TORCH_CHECK(heads == q.size(1), "npu_fusion_attention: head_num ", heads, " but the query has ", q.size(1));
    Attention made = attend(q, k, v, layout, hidden, scale);
    int64_t seed = drawn_seed(keep);
    Tensor answer = at::matmul(made.weights * left_over(made.weights, keep, seed), made.value).to(q.scalar_type());
    Tensor statistics = at::zeros({q.size(0), q.size(1), q.size(2), 8}, q.options().dtype(at::kFloat));
    return {answer, statistics, at::ones_like(statistics), at::empty({0}, q.options()), seed, 0, 0};
}

Tensor per_key_head(const Tensor &grad, const Tensor &like) {
    return grad.reshape({like.size(0), like.size(1), -1, like.size(2), like.size(3)}).sum(2).to(like.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_grad(
    const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &dy, int64_t, c10::string_view layout, const MaybeTensor &pse,
    const MaybeTensor &padding, const MaybeTensor &hidden, const MaybeTensor &, const MaybeTensor &, const MaybeTensor &,
    const MaybeTensor &, double scale, double keep, int64_t, int64_t, int64_t, int64_t seed, int64_t, int64_t, Numbers prefix,
    Numbers q_len, Numbers k_len, int64_t sparse_mode, bool, bool, c10::string_view, const MaybeTensor &sink) {
    NoAutocast here;
    refuse_others(pse, padding, prefix, q_len, k_len, sparse_mode, sink);
    Attention made = attend(q, k, v, layout, hidden, scale);
    Tensor grad = dy.to(at::kFloat), left = left_over(made.weights, keep, seed);
    Tensor d_weights = at::matmul(grad, made.value.transpose(-1, -2)) * left;
    Tensor d_scores = made.weights * (d_weights - (d_weights * made.weights).sum(-1, true)) * scale;
    Tensor dq = at::matmul(d_scores, made.key).to(q.scalar_type()), dk = at::matmul(d_scores.transpose(-1, -2), made.query);
    Tensor dv = at::matmul((made.weights * left).transpose(-1, -2), grad), none = at::empty({0}, q.options());
    return {dq, per_key_head(dk, k), per_key_head(dv, v), none, none};
}

// --- AdamW over flat buffers, as NpuFusedAdamW calls it: weights, first and second moments are written in place ---

std::tuple<Tensor, Tensor, Tensor> adam_w(const at::Scalar &beta1_power, const at::Scalar &beta2_power, const at::Scalar &lr,
                                          const at::Scalar &decay, const at::Scalar &beta1, const at::Scalar &beta2,
                                          const at::Scalar &epsilon, const Tensor &grad, const MaybeTensor &largest,
                                          std::optional<bool> amsgrad, std::optional<bool> maximize, at::TensorList out) {
    TORCH_CHECK(!amsgrad.value_or(false) && !maximize.value_or(false), "simulated npu_apply_adam_w: no amsgrad, no maximize");
    Tensor weight = out[0], mean = out[1], square = out[2], slope = grad.to(mean.scalar_type());
    weight.mul_(1.0 - lr.toDouble() * decay.toDouble());
    mean.mul_(beta1).add_(slope, 1.0 - beta1.toDouble());
    square.mul_(beta2).addcmul_(slope, slope, 1.0 - beta2.toDouble());
    Tensor spread = (square / (1.0 - beta2_power.toDouble())).sqrt_().add_(epsilon);
    weight.sub_((mean / spread).mul_(lr.toDouble() / (1.0 - beta1_power.toDouble())));
    return {weight, mean, square};
}

// --- the overflow flag of a device: this one has none, so the gradients themselves are looked at ---

bool has_non_finite(at::TensorList gradients) {
    for (const Tensor &gradient : gradients)
        if (!at::isfinite(gradient).all().item<bool>()) return true;
    return false;
}

Tensor float_status(const Tensor &input) { return at::zeros({8}, input.options().dtype(at::kFloat)); }
Tensor same_status(const Tensor &input, int64_t) { return input; }

TORCH_LIBRARY_IMPL(npu, PrivateUse1, kernels) {
    struct Quiet : c10::WarningHandler {
        void process(const c10::Warning &) override {}
    } quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    kernels.impl("npu_rms_norm", rms_norm);
    kernels.impl("npu_rms_norm_backward", rms_norm_backward);
    kernels.impl("npu_rotary_mul", rotary);
    kernels.impl("npu_rotary_mul_backward", rotary_backward);
    kernels.impl("npu_swiglu", swiglu);
    kernels.impl("npu_swiglu_backward", swiglu_backward);
    kernels.impl("npu_fusion_attention", attention);
    kernels.impl("npu_fusion_attention_grad", attention_grad);
    kernels.impl("npu_apply_adam_w.out", adam_w);
    kernels.impl("_amp_foreach_non_finite_check", has_non_finite);
    kernels.impl("npu_alloc_float_status", float_status);
    kernels.impl("npu_get_float_status", same_status);
    kernels.impl("npu_clear_float_status", same_status);
}

}  // namespace
