//! Autocast's lists, by libtorch's version. They are those of the guide's page, which the tests compare with PyTorch.

use std::collections::BTreeMap;
use std::fmt;

use lazy_static::lazy_static;
use serde::{Deserialize, Serialize};
use tch::Device;

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

/// The list of an operator on a device (`cpu` or `cuda`), with the versions for which it holds if not for all.
type Entries = BTreeMap<(&'static str, &'static str), Vec<(AutocastList, &'static str)>>;

lazy_static! {
    static ref LISTS: Entries = read(include_str!("../../../docs/operations.md"));
}

fn read(page: &'static str) -> Entries {
    let mut entries = Entries::new();
    for device in ["cpu", "cuda"] {
        let start = format!("<!-- generated: {device} -->");
        let part = page.split(start.as_str()).nth(1).unwrap_or_default();
        let part = part.split("<!-- end -->").next().unwrap_or_default();
        let mut list = None;
        for line in part.lines() {
            if let Some(heading) = line.strip_prefix("### ") {
                list = list_of(heading);
            } else if let Some(list) = list {
                // Every second piece is between backticks, and the text behind it may name versions.
                let pieces: Vec<&str> = line.split('`').skip(1).collect();
                for pair in pieces.chunks_exact(2) {
                    entries.entry((device, pair[0])).or_default().push((list, pair[1]));
                }
            }
        }
    }
    entries
}

fn list_of(heading: &str) -> Option<AutocastList> {
    match heading {
        "In the dtype of the region" => Some(AutocastList::LowerPrecision),
        "In f32" => Some(AutocastList::F32),
        "In f32, unless the call asks for a dtype" => Some(AutocastList::F32UnlessAsked),
        "In the widest dtype of the inputs" => Some(AutocastList::Widest),
        "Refused" => Some(AutocastList::Refused),
        _ => None,
    }
}

/// The list of an operator in a version.
pub(super) fn list_in(version: &str, on_cuda: bool, operator: &str) -> AutocastList {
    let name = operator.trim_start_matches("aten::");
    let device = if on_cuda { "cuda" } else { "cpu" };
    let named = |versions: &str| VERSIONS.iter().any(|version| versions.contains(version));
    let entries = LISTS.get(&(device, name)).map_or(&[][..], Vec::as_slice);
    let holds = entries.iter().find(|(_, on)| !named(on) || on.contains(version));
    holds.map_or(AutocastList::Untouched, |(list, _)| *list)
}

/// Returns the list of an operator on a device, for the libtorch that is linked, from the guide's page [operations],
/// which covers 2.11 and 2.13. In another version, an operator that is on different lists in these counts as untouched.
///
/// [operations]: crate::guide::operations
///
/// # Examples
///
/// ```
/// use tch::Device;
/// use tch_amp::insight::{AutocastList, autocast_list};
///
/// assert_eq!(autocast_list(Device::Cpu, "aten::linear"), AutocastList::LowerPrecision);
/// assert_eq!(autocast_list(Device::Cuda(0), "softmax"), AutocastList::F32UnlessAsked);
/// assert_eq!(autocast_list(Device::Cpu, "softmax"), AutocastList::Untouched);
/// ```
pub fn autocast_list(device: Device, operator: &str) -> AutocastList {
    list_in(LINKED, matches!(device, Device::Cuda(_)), operator)
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
}
