// Custom autograd functions: the calls before and after forward, and during backward.

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "function_node.h"
#include "guarded.h"

#ifdef TAMP_WITH_INSIGHT
#include "insight/recording.h"
#endif

namespace {

using tamp::FunctionNode;
using tamp::NodePtr;
using torch::autograd::variable_list;

// Returns another tensor over the memory of `t`, for an output that is also held elsewhere, for example in a value that
// forward saved. If the node became the history of that same tensor, the value would keep the node alive, and the node
// the value.
at::Tensor separate(const at::Tensor &t) {
  at::AutoGradMode no_grad(false);
  if (t.is_view()) return t.view_as(t);
  auto impl = t.unsafeGetTensorImpl()->shallow_copy_and_detach(t.unsafeGetTensorImpl()->version_counter(),
                                                               /*allow_tensor_metadata_change=*/true);
  return at::Tensor(std::move(impl));
}

// A finished call of forward: its tensors, and what the context was told about them.
class Call {
 public:
  Call(const tamp_function_call &call, tamp_tensor *const *outputs, size_t count)
      : inputs_(call.inputs),
        infos_(call.infos),
        saved_(call.saved),
        dirty_(call.dirty),
        non_differentiable_(call.non_differentiable),
        outputs_{outputs, count},
        recorded_(call.recorded != 0) {}

  bool recorded() const { return recorded_; }

  // Fails if the context was told something wrong, before anything changes.
  void check_marks() const {
    for (size_t i = 0; i < dirty_.count; ++i) {
      const auto *t = impl(dirty_, i);
      TORCH_CHECK(count(inputs_, t) != 0, "mark_dirty was given a tensor that is not an input");
      TORCH_CHECK(count(outputs_, t) == 1, "an input that is marked dirty must be returned, and only once");
      for (size_t j = 0; recorded_ && j < inputs_.count; ++j) {
        // The history of the input will own the node, so nothing that the node owns may own the input: such a cycle
        // would never be freed.
        TORCH_CHECK(impl(inputs_, j) != t || tensor(inputs_, j).use_count() <= infos_[j].uses + own_handles(t),
                    "input ", j,
                    " is marked dirty and kept by forward, and would never be freed; keep it with "
                    "save_for_backward");
      }
    }
    for (size_t i = 0; i < non_differentiable_.count; ++i) {
      TORCH_CHECK(count(outputs_, impl(non_differentiable_, i)) != 0,
                  "mark_non_differentiable was given a tensor that is not an output");
    }
  }

  torch::autograd::edge_list edges() const {
    torch::autograd::edge_list out;
    out.reserve(inputs_.count);
    for (size_t i = 0; i < inputs_.count; ++i) {
      const auto &t = tensor(inputs_, i);
      out.push_back(t.defined() ? torch::autograd::impl::gradient_edge(t) : torch::autograd::Edge());
    }
    return out;
  }

  // Returns the outputs for the caller. If there is a `node`, it becomes their history and saves its tensors.
  variable_list finish(const NodePtr<FunctionNode> &node) const {
    const auto raw = raw_outputs();
    auto out = is_plain(raw) ? plain(raw, node) : wrap(raw, node);
    if (node != nullptr) save(out, *node);
    return out;
  }

 private:
  static const at::Tensor &tensor(const tamp_tensors &list, size_t i) { return tamp::tensor(list.tensors[i]); }
  static at::TensorImpl *impl(const tamp_tensors &list, size_t i) { return tensor(list, i).unsafeGetTensorImpl(); }

  static size_t count(const tamp_tensors &list, const at::TensorImpl *wanted) {
    size_t found = 0;
    for (size_t i = 0; i < list.count; ++i) found += impl(list, i) == wanted ? 1 : 0;
    return found;
  }

  // The number of handles of `t` that this call itself holds, apart from those of the inputs.
  size_t own_handles(const at::TensorImpl *t) const {
    return count(saved_, t) + count(dirty_, t) + count(non_differentiable_, t) + count(outputs_, t);
  }

  // Whether this is the usual case, in which nothing requires libtorch's handling of views, changes in place and
  // forward-mode gradients.
  bool is_plain(const std::vector<std::optional<at::Tensor>> &raw) const {
    for (size_t i = 0; i < inputs_.count; ++i) {
      const auto &t = tensor(inputs_, i);
      if (t.defined() && t._fw_grad(/*level=*/0).defined()) return false;
    }
    for (size_t i = 0; i < raw.size(); ++i) {
      const auto &t = raw[i];
      const bool is_usual = t.has_value() && torch::autograd::isDifferentiableType(t->scalar_type()) &&
                            !t->requires_grad() && !t->is_view() && count(inputs_, t->unsafeGetTensorImpl()) == 0;
      if (!is_usual) return false;
    }
    return dirty_.count == 0 && non_differentiable_.count == 0;
  }

  static variable_list plain(const std::vector<std::optional<at::Tensor>> &raw, const NodePtr<FunctionNode> &node) {
    variable_list out;
    out.reserve(raw.size());
    for (const auto &t : raw) {
      if (node != nullptr) torch::autograd::impl::set_gradient_edge(*t, {node, node->add_input_metadata(*t)});
      out.push_back(*t);
    }
    return out;
  }

  variable_list wrap(const std::vector<std::optional<at::Tensor>> &raw, const NodePtr<FunctionNode> &node) const {
    const auto dirty = dirty_impls();
    for (auto *t : dirty) {
      if (!t->is_inference()) t->bump_version();
    }
    variable_list inputs;
    inputs.reserve(inputs_.count);
    for (size_t i = 0; i < inputs_.count; ++i) inputs.push_back(tensor(inputs_, i));
    const auto no_jvp = [](const variable_list &, const variable_list &) -> variable_list {
      TORCH_CHECK(false, "custom functions have no forward-mode derivative");
    };
    const auto view = [](const at::Tensor &t) { return t.view_as(t); };
    auto wrapped = torch::autograd::_wrap_outputs(inputs, non_differentiable_impls(raw), dirty, raw, node, no_jvp, {},
                                                  view, /*pure_view=*/false);
    variable_list out;
    out.reserve(wrapped.size());
    for (auto &t : wrapped) out.push_back(t.value_or(at::Tensor()));
    if (node != nullptr) node->describe_outputs(out);
    return out;
  }

  std::unordered_set<at::TensorImpl *> dirty_impls() const {
    std::unordered_set<at::TensorImpl *> out;
    for (size_t i = 0; i < dirty_.count; ++i) out.insert(impl(dirty_, i));
    return out;
  }

  std::unordered_set<at::TensorImpl *> non_differentiable_impls(
      const std::vector<std::optional<at::Tensor>> &raw) const {
    std::unordered_set<at::TensorImpl *> out;
    for (size_t i = 0; i < raw.size(); ++i) {
      const bool marked = raw[i].has_value() && count(non_differentiable_, impl(outputs_, i)) != 0;
      if (marked) out.insert(raw[i]->unsafeGetTensorImpl());
    }
    return out;
  }

  std::vector<std::optional<at::Tensor>> raw_outputs() const {
    std::vector<std::optional<at::Tensor>> out;
    out.reserve(outputs_.count);
    for (size_t i = 0; i < outputs_.count; ++i) {
      const auto &t = tensor(outputs_, i);
      const bool is_ours = recorded_ && t.defined() && count(inputs_, impl(outputs_, i)) == 0;
      // A tensor that was returned before has one more handle, in `out`, and so its outputs are separate as well.
      const bool is_held = is_ours && t.use_count() > own_handles(impl(outputs_, i));
      if (t.defined()) {
        out.emplace_back(is_held ? separate(t) : t);
      } else {
        out.emplace_back();
      }
    }
    return out;
  }

  // Saves the tensors that forward asked for. For an output this is the tensor that the caller gets.
  void save(const variable_list &results, FunctionNode &node) const {
    node.reserve_saved(saved_.count);
    for (size_t i = 0; i < saved_.count; ++i) {
      const auto *t = &tensor(saved_, i);
      for (size_t j = 0; t->defined() && j < outputs_.count; ++j) {
        if (impl(outputs_, j) == impl(saved_, i) && count(inputs_, impl(saved_, i)) == 0) t = &results[j];
      }
      node.save(*t);
    }
  }

  tamp_tensors inputs_;
  const tamp_function_input *infos_;
  tamp_tensors saved_;
  tamp_tensors dirty_;
  tamp_tensors non_differentiable_;
  tamp_tensors outputs_;
  bool recorded_;
};

const FunctionNode &node(const tamp_node *n) { return *reinterpret_cast<const FunctionNode *>(n); }

}  // namespace

extern "C" {

uint8_t tamp_function_begin(tamp_tensor *const *inputs, size_t count, tamp_function_input *infos, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t {
    bool recorded = false;
    for (size_t i = 0; i < count; ++i) {
      const auto &t = tamp::tensor(inputs[i]);
      infos[i].requires_grad = t.defined() && at::GradMode::is_enabled() && t.requires_grad();
      infos[i].uses = t.use_count();
      recorded = recorded || infos[i].requires_grad != 0;
    }
    return recorded;
  });
}

void tamp_function_record(const tamp_function *function, const tamp_function_call *call, tamp_tensor *const *outputs,
                          size_t count, char **err) noexcept {
  tamp::State state(*function);  // owned here, whatever fails
  tamp::guarded(err, [&] {
    const Call ended(*call, outputs, count);
    ended.check_marks();
    NodePtr<FunctionNode> node;
    if (ended.recorded()) {
      node = tamp::make_node<FunctionNode>(std::move(state), ended.edges());
#ifdef TAMP_WITH_INSIGHT
      tamp::note_function(node->function_name(), node->thread_id(), node->sequence_nr());
#endif
    }
    auto results = ended.finish(node);
    for (size_t i = 0; i < count; ++i) tamp::tensor(outputs[i]) = std::move(results[i]);
  });
}

void tamp_function_saved_tensors(const tamp_node *self, tamp_tensor **out, size_t count, char **err) noexcept {
  tamp::guarded(err, [&] {
    c10::SmallVector<at::Tensor, 8> saved;
    for (size_t i = 0; i < count; ++i) saved.push_back(node(self).saved(i));
    for (size_t i = 0; i < count; ++i) out[i] = tamp::give(std::move(saved[i]));
  });
}

uint8_t tamp_function_needs_input_grad(const tamp_node *self, size_t input, char **err) noexcept {
  return tamp::guarded(err, [&]() -> uint8_t { return node(self).task_should_compute_output(input); });
}

uint8_t tamp_backward_accumulates(char **err) noexcept {
  return tamp::guarded(err,
                       []() -> uint8_t { return torch::autograd::Engine::get_default_engine().is_checkpoint_valid(); });
}

}  // extern "C"
