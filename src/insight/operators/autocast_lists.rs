//! Autocast's lists, by libtorch's version.

mod table;

use std::ffi::CString;
use std::fmt;

use serde::{Deserialize, Serialize};
use tch::Device;

use table::{LISTS, List};

/// The dtype in which autocast runs an operator inside of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AutocastList {
    /// The dtype of the region.
    LowerPrecision,
    /// f32.
    F32,
    /// f32, unless the call asks for a dtype.
    F32UnlessAsked,
    /// The widest dtype of the inputs.
    Widest,
    /// It is refused.
    Refused,
    /// The dtypes of its inputs: the operator is on no list.
    Untouched,
}

impl fmt::Display for AutocastList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LowerPrecision => "lower precision",
            Self::F32 => "f32",
            Self::F32UnlessAsked => "f32 unless a dtype is asked for",
            Self::Widest => "widest input",
            Self::Refused => "refused",
            Self::Untouched => "untouched",
        })
    }
}

/// The versions of libtorch whose lists are known.
pub(super) const VERSIONS: [&str; 2] = ["2.11", "2.13"];

/// The version that is linked.
pub(super) const LINKED: &str = match option_env!("TAMP_LIBTORCH") {
    Some(version) => version,
    None => VERSIONS[VERSIONS.len() - 1],
};

/// The lists of a device in a version.
fn lists_in(version: &str, on_cuda: bool) -> impl Iterator<Item = &'static List> {
    let wanted = if on_cuda { "cuda" } else { "cpu" };
    let is_here = move |(device, _, on, _): &&List| {
        *device == wanted && (on.len() == VERSIONS.len() || on.contains(&version))
    };
    LISTS.iter().filter(is_here)
}

/// The list of an operator in a version.
pub(super) fn list_in(version: &str, on_cuda: bool, operator: &str) -> AutocastList {
    let name = operator.trim_start_matches("aten::");
    let mut lists = lists_in(version, on_cuda);
    let holding = lists.find(|(.., names)| names.binary_search(&name).is_ok());
    holding.map_or(AutocastList::Untouched, |(_, list, ..)| *list)
}

impl AutocastList {
    /// The operators of the list on a device, with libtorch's namespace.
    pub(crate) fn names(self, device: Device) -> Vec<CString> {
        let lists = lists_in(LINKED, matches!(device, Device::Cuda(_)));
        let names = lists.filter(|(_, list, ..)| *list == self).flat_map(|(.., names)| *names);
        // No name has a NUL.
        names.filter_map(|name| CString::new(format!("aten::{name}")).ok()).collect()
    }

    /// Returns the list of an operator on a device, for the libtorch that is linked. Known are the lists of 2.11 and
    /// 2.13, which the guide's page [operations] has; in another version, an operator that is on different lists in
    /// these counts as untouched.
    ///
    /// [operations]: crate::guide::operations
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Device;
    /// use tch_amp::insight::AutocastList;
    ///
    /// assert_eq!(AutocastList::of(Device::Cpu, "aten::linear"), AutocastList::LowerPrecision);
    /// assert_eq!(AutocastList::of(Device::Cuda(0), "softmax"), AutocastList::F32UnlessAsked);
    /// assert_eq!(AutocastList::of(Device::Cpu, "softmax"), AutocastList::Untouched);
    /// ```
    pub fn of(device: Device, operator: &str) -> Self {
        list_in(LINKED, matches!(device, Device::Cuda(_)), operator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operator_can_be_on_the_list_of_one_version_only() {
        let on = |version| list_in(version, true, "aten::rms_norm");
        assert_eq!((on("2.11"), on("2.13")), (AutocastList::Untouched, AutocastList::F32));
        assert_eq!(list_in("2.11", true, "mm"), AutocastList::LowerPrecision);
        assert_eq!(list_in("2.11", false, "cat"), AutocastList::Widest);
        assert_eq!(list_in("2.13", false, "relu"), AutocastList::Untouched);
    }

    #[test]
    fn every_row_is_found_by_its_name() {
        for (device, list, on, names) in LISTS {
            assert!(names.is_sorted(), "{device} {list}");
            for (version, name) in on.iter().flat_map(|v| names.iter().map(move |name| (v, name))) {
                assert_eq!(list_in(version, *device == "cuda", name), *list, "{device} {name}");
            }
        }
    }
}
