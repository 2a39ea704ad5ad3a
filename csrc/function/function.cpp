// Custom autograd functions, that is the calls before and after forward and during backward, and the gradients of chosen
// tensors.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/is_same_size.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "border/guarded.h"
#include "function/function_node.h"

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

// The computation of the gradients of chosen tensors: all that is checked, and then the pass of the engine.
class Grad {
 public:
  // A problem, and the place of its tensor.
  struct Problem {
    uint8_t what = TAMP_GRAD_POSSIBLE;
    size_t place = 0;
  };

  explicit Grad(const tamp_grad_call &call) : call_(call) {}

  Problem check() {
    for (size_t i = 0; i < call_.outputs.count; ++i) {
      if (const auto what = check_output(i); what != TAMP_GRAD_POSSIBLE) return {what, i};
    }
    for (size_t i = 0; i < call_.inputs.count; ++i) {
      const auto &input = tamp::tensor(call_.inputs.tensors[i]);
      if (!input.defined()) return {TAMP_GRAD_INPUT_UNDEFINED, i};
      if (!input.requires_grad()) return {TAMP_GRAD_INPUT_WITHOUT_GRAD, i};
      inputs_.push_back(torch::autograd::impl::gradient_edge(input));
    }
    return call_.allow_unused != 0 ? Problem() : find_unused();
  }

  // Writes the gradients only if there is no problem.
  Problem run(tamp_tensor **gradients) {
    auto &engine = torch::autograd::Engine::get_default_engine();
    const bool retain = call_.retain_graph != 0, create = call_.create_graph != 0;
    const auto found = engine.execute(outputs_, seeds_, retain, create, /*accumulate_grad=*/false, inputs_);
    if (call_.allow_unused == 0) {
      const auto none = std::find_if(found.begin(), found.end(), [](const at::Tensor &t) { return !t.defined(); });
      if (none != found.end()) return {TAMP_GRAD_INPUT_UNUSED, static_cast<size_t>(none - found.begin())};
    }
    std::vector<std::unique_ptr<at::Tensor>> out;
    for (const auto &t : found) out.push_back(t.defined() ? std::make_unique<at::Tensor>(t) : nullptr);
    for (size_t i = 0; i < out.size(); ++i) gradients[i] = tamp::give(std::move(out[i]));
    return {};
  }

 private:
  uint8_t check_output(size_t i) {
    const auto &output = tamp::tensor(call_.outputs.tensors[i]);
    if (!output.defined()) return TAMP_GRAD_OUTPUT_UNDEFINED;
    if (!output.requires_grad()) return TAMP_GRAD_OUTPUT_WITHOUT_GRAPH;
    const auto *given = call_.grad_outputs.tensors[i];
    if (given == nullptr) {
      if (output.numel() != 1) return TAMP_GRAD_OUTPUT_NOT_SCALAR;
      if (!output.is_floating_point()) return TAMP_GRAD_OUTPUT_NOT_REAL;
      const tamp::OutsideRegions own;
      seeds_.push_back(at::ones_like(output));
    } else {
      const auto &seed = tamp::tensor(given);
      if (!seed.defined()) return TAMP_GRAD_GIVEN_UNDEFINED;
      if (!at::is_same_size(output, seed)) return TAMP_GRAD_GIVEN_SHAPE;
      if (output.is_complex() != seed.is_complex()) return TAMP_GRAD_GIVEN_DTYPE;
      seeds_.push_back(seed);
    }
    outputs_.push_back(torch::autograd::impl::gradient_edge(output));
    return TAMP_GRAD_POSSIBLE;
  }

  // Returns the first input to which no edge below the outputs leads. The engine would find it only after the pass,
  // which frees the graph.
  Problem find_unused() const {
    std::unordered_set<torch::autograd::Edge> missing(inputs_.begin(), inputs_.end());
    std::unordered_set<const torch::autograd::Node *> seen;
    std::vector<const torch::autograd::Node *> open;
    const auto follow = [&](const torch::autograd::edge_list &edges) {
      for (const auto &edge : edges) {
        if (!edge.is_valid()) continue;
        missing.erase(edge);
        if (seen.insert(edge.function.get()).second) open.push_back(edge.function.get());
      }
    };
    follow(outputs_);
    while (!missing.empty() && !open.empty()) {
      const auto *next = open.back();
      open.pop_back();
      follow(next->next_edges());
    }
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (missing.count(inputs_[i]) != 0) return {TAMP_GRAD_INPUT_UNUSED, i};
    }
    return {};
  }

  const tamp_grad_call &call_;
  torch::autograd::edge_list outputs_;
  torch::autograd::edge_list inputs_;
  variable_list seeds_;
};

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

uint8_t tamp_grad(const tamp_grad_call *call, tamp_tensor **gradients, size_t *place, char **err) noexcept {
  return tamp::guarded_inside_regions(err, [&]() -> uint8_t {
    Grad grad(*call);
    auto problem = grad.check();
    if (problem.what == TAMP_GRAD_POSSIBLE) problem = grad.run(gradients);
    *place = problem.place;
    return problem.what;
  });
}

}  // extern "C"
