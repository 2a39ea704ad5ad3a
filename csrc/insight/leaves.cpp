// The leaves of a graph.

#include <unordered_set>

#include "gradients.h"
#include "guarded.h"
#include "shim_insight.h"

extern "C" {

size_t tamp_leaves(const tamp_tensor *loss, tamp_tensor *const *parameters, size_t count, tamp_tensor **leaves,
                   size_t room, char **err) noexcept {
  return tamp::guarded(err, [&]() -> size_t {
    std::unordered_set<const at::TensorImpl *> known;
    for (size_t i = 0; i < count; ++i) known.insert(tamp::tensor(parameters[i]).unsafeGetTensorImpl());
    size_t found = 0;
    tamp::for_each_leaf(tamp::tensor(loss), [&](const at::Tensor &leaf) {
      if (known.count(leaf.unsafeGetTensorImpl()) != 0) return;
      if (found < room) leaves[found] = tamp::give(leaf);
      ++found;
    });
    return found;
  });
}

}  // extern "C"
