// Groups of what one launch can take together, in the order in which they are first met: launches and sums keep their
// order.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

namespace tamp {

// Returns the first group that `takes` an item, or a new one made of `parts`.
template <typename Groups, typename Takes, typename... Parts>
auto &group_for(Groups &groups, const Takes &takes, Parts &&...parts) {
  const auto found = std::find_if(groups.begin(), groups.end(), takes);
  if (found != groups.end()) return *found;
  groups.push_back(typename Groups::value_type{std::forward<Parts>(parts)...});
  return groups.back();
}

// Groups items for which `key` returns the same, and keeps their order within a group.
template <typename Item, typename Key>
std::vector<std::vector<Item>> group_by(const std::vector<Item> &items, const Key &key) {
  std::vector<std::vector<Item>> out;
  for (const auto &item : items) {
    group_for(out, [&](const auto &group) { return key(group.front()) == key(item); }).push_back(item);
  }
  return out;
}

}  // namespace tamp
