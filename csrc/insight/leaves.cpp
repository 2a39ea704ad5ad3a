// The leaves of a graph.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <unordered_set>
#include <vector>

#include "guarded.h"
#include "shim_insight.h"

extern "C" {

size_t tamp_leaves(const tamp_tensor *loss, tamp_tensor *const *parameters, size_t count, tamp_tensor **leaves,
                   size_t room, char **err) noexcept {
  return tamp::guarded(err, [&]() -> size_t {
    using torch::autograd::Node;
    const at::Tensor &result = tamp::tensor(loss);
    if (!result.requires_grad() || result.grad_fn() == nullptr) return 0;
    std::unordered_set<const at::TensorImpl *> known;
    for (size_t i = 0; i < count; ++i) known.insert(tamp::tensor(parameters[i]).unsafeGetTensorImpl());
    size_t found = 0;
    // A list of what is left to visit, because a graph can be deeper than the stack.
    std::vector<Node *> left{result.grad_fn().get()};
    std::unordered_set<const Node *> seen{left.front()};
    while (!left.empty()) {
      Node *node = left.back();
      left.pop_back();
      if (const auto *leaf = dynamic_cast<torch::autograd::AccumulateGrad *>(node)) {
        if (known.count(leaf->variable.unsafeGetTensorImpl()) != 0) continue;
        if (found < room) leaves[found] = tamp::give(leaf->variable);
        ++found;
        continue;
      }
      for (const auto &edge : node->next_edges()) {
        Node *next = edge.function.get();
        if (next != nullptr && seen.insert(next).second) left.push_back(next);
      }
    }
    return found;
  });
}

}  // extern "C"
