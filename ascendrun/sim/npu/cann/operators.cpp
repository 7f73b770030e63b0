// Every aten operator on npu tensors, computed by torch's own CPU kernel over the same bytes.
//
// Loaded by aclInit, when torch_npu has registered its kernels: those of aten are then replaced by `compute_on_host`.
// Views and what makes memory stay torch_npu's, so that its allocator, its storages and its limits are the real ones.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::IValue;

at::Tensor as_host(const at::Tensor &tensor) {
    auto options = tensor.options().device(at::kCPU).requires_grad(false);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void *) {}, options);
}

// One call: which npu tensors went in, and what stood for each on the host.
struct Crossing {
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
    std::optional<c10::Device> device;

    at::Tensor to_host(const at::Tensor &tensor) {
        if (!tensor.defined() || !tensor.device().is_privateuseone()) return tensor;
        device = tensor.device();
        pairs.emplace_back(tensor, as_host(tensor));
        return pairs.back().second;
    }

    // An answer that is one of the arguments must be that very argument; a new one gets memory of the device.
    at::Tensor to_device(const at::Tensor &tensor) {
        if (!tensor.defined() || !tensor.device().is_cpu() || !device) return tensor;
        for (auto &[on_device, on_host] : pairs)
            if (on_host.is_same(tensor)) return on_device;
        at::Tensor answer = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device));
        if (tensor.numel()) as_host(answer).copy_(tensor);
        return answer;
    }

    // An `out` that the kernel resized has new bytes on the host; the device's is resized too and takes them.
    void follow_resized() {
        for (auto &[on_device, on_host] : pairs) {
            if (on_device.sizes() == on_host.sizes()) continue;
            on_device.resize_(on_host.sizes());
            if (on_host.numel()) as_host(on_device).copy_(on_host);
        }
    }
};

template <typename Change>
void change_tensors(IValue &value, Change change) {
    if (value.isTensor()) {
        value = IValue(change(value.toTensor()));
    } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto &tensor : list) tensor = change(tensor);
        value = IValue(list);
    } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> changed;
        for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
            changed.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
        value = IValue(changed);
    }
}

// A copy waits for the device, so this is where torch_npu notices, and raises, what went wrong there.
void tell_device_error(const Crossing &crossing) {
    if (crossing.device) c10::impl::getDeviceGuardImpl(c10::kPrivateUse1)->synchronizeDevice(crossing.device->index());
}

void compute_on_host(const c10::OperatorHandle &op, c10::DispatchKeySet, torch::jit::Stack *stack) {
    Crossing crossing;
    size_t arguments = op.schema().arguments().size();
    for (size_t i = stack->size() - arguments; i < stack->size(); ++i) {
        IValue &value = (*stack)[i];
        if (value.isDevice() && value.toDevice().is_privateuseone()) {
            crossing.device = value.toDevice();
            value = IValue(c10::Device(c10::kCPU));
        } else if (value.isGenerator()) {
            value = IValue();  // the host's own generator: torch.manual_seed sets both
        } else {
            change_tensors(value, [&](const at::Tensor &tensor) { return crossing.to_host(tensor); });
        }
    }
    if (op.schema().name() == "aten::copy_") tell_device_error(crossing);
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
    crossing.follow_resized();
    for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
        change_tensors((*stack)[i], [&](const at::Tensor &tensor) { return crossing.to_device(tensor); });
}

// Operators that torch writes in terms of others; torch_npu has kernels of its own for some, here torch's way is taken.
void take_apart(const c10::OperatorHandle &op, c10::DispatchKeySet, torch::jit::Stack *stack) {
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::AutogradCPU), stack);
}

bool gives_a_view(const c10::FunctionSchema &schema) {
    for (const auto &answer : schema.returns())
        if (answer.alias_info() && !answer.alias_info()->isWrite()) return true;
    return false;
}

const std::set<std::string> &kept() {
    static const std::set<std::string> names = {
        "empty", "empty_strided", "empty_like", "new_empty", "resize_", "resize_as_", "set_", "set_data", "record_stream",
        "is_pinned", "pin_memory", "_pin_memory", "_to_copy", "to", "_copy_from", "_copy_from_and_resize", "is_set_to",
        "_local_scalar_dense", "_has_compatible_shallow_copy_type", "_reshape_alias", "untyped_storage"};
    return names;
}

void install() {
    static auto *kernels = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
    static auto *gradients = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
    auto &dispatcher = c10::Dispatcher::singleton();
    for (const auto &name : dispatcher.getAllOpNames()) {
        if (name.name.rfind("aten::", 0) != 0 || kept().count(name.name.substr(6))) continue;
        auto op = dispatcher.findOp(name);
        if (!op || !op->hasSchema() || gives_a_view(op->schema())) continue;
        bool on_npu = op->hasKernelForDispatchKey(DispatchKey::PrivateUse1), on_host = op->hasKernelForDispatchKey(DispatchKey::CPU);
        bool is_composite = op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
        bool has_default = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
        std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
        if (on_npu && is_composite && !on_host) {
            kernels->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&take_apart>());
            gradients->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&take_apart>());
        } else if (on_host || (on_npu && has_default)) {
            kernels->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
        }
    }
}

struct Quiet : c10::WarningHandler {
    void process(const c10::Warning &) override {}  // "overriding a previously registered kernel": that is the purpose
};

const bool installed = [] {
    Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    install();
    return true;
}();

}  // namespace
