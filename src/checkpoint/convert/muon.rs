//! Conversion of Muon, for which PyTorch has two optimizers: a dict of their states, `muon` and `adamw`.
//!
//! A group of this crate becomes a group of each, in the same place. Python may have groups that do not correspond;
//! then each of them becomes a group here.

use super::from::{Items, Problem, Reader};
use super::optimizer::{Group, names_of, numbered};
use crate::checkpoint::part::{OptimizerPart, Part};
use crate::checkpoint::pickle::{Value, get};
use crate::checkpoint::plain::Plain;
use crate::optim::{AdamW, Algorithm, Muon, ParamGroup, ParamGroupState};

/// The keys of the two states.
pub(super) const MUON: &str = "muon";
pub(super) const ADAMW: &str = "adamw";

type Groups = Vec<ParamGroupState>;

/// Divides the groups of Muon into those of PyTorch's two optimizers; `None` for another algorithm.
pub(super) fn split(part: &OptimizerPart) -> Option<(Groups, Groups)> {
    let split = |group: &ParamGroupState| {
        let ParamGroup { lr, algorithm } = group.options;
        let Algorithm::Muon(Muon { adamw, adamw_lr_factor, .. }) = algorithm else {
            return None;
        };
        let (by_muon, others) =
            group.params.iter().cloned().partition(|name| part.by_muon.contains(name));
        let rest = ParamGroup::new(lr * adamw_lr_factor, adamw);
        Some((
            ParamGroupState { options: group.options, params: by_muon },
            ParamGroupState { options: rest, params: others },
        ))
    };
    let pairs: Option<Vec<_>> = part.param_groups.iter().map(split).collect();
    pairs.filter(|pairs| !pairs.is_empty()).map(|pairs| pairs.into_iter().unzip())
}

/// Returns the two states.
fn pair(items: &Items) -> Option<[&Items; 2]> {
    let state_of = |key: &str| match get(items, key) {
        Some(Value::Dict(state)) if get(state, "param_groups").is_some() => Some(state.as_slice()),
        _ => None,
    };
    Some([state_of(MUON)?, state_of(ADAMW)?])
}

/// Whether a dict has the states of both optimizers, and nothing else.
pub(super) fn is_pair(items: &Items) -> bool {
    items.len() == 2 && pair(items).is_some()
}

/// Whether this crate has saved the groups, and has added the options that PyTorch does not have.
fn is_ours(state: &Items) -> bool {
    let has_option =
        |group: &Value| matches!(group, Value::Dict(items) if get(items, "use_muon").is_some());
    matches!(get(state, "param_groups"), Some(Value::List(groups)) if groups.iter().all(has_option))
}

fn adamw_of(group: &Group) -> Result<AdamW, Problem> {
    match group.options.algorithm {
        Algorithm::AdamW(adamw) => Ok(adamw),
        _ => Err("has param_groups under `adamw` that are not those of AdamW".to_owned()),
    }
}

/// Joins the options of a group of Muon and one of AdamW.
fn joined(muon: &Group, adamw: &Group) -> Result<ParamGroup, Problem> {
    let (lr, rest) = (muon.options.lr, adamw.options.lr);
    let mut options = muon_of(muon)?;
    options.adamw = adamw_of(adamw)?;
    // The learning rates may have been set in Python since.
    if lr * options.adamw_lr_factor != rest && (rest / lr).is_finite() {
        options.adamw_lr_factor = factor(lr, rest);
    }
    Ok(ParamGroup::new(lr, options))
}

/// The factor from one learning rate to another: the quotient, or a number beside it whose product is exact.
fn factor(lr: f64, rest: f64) -> f64 {
    let quotient = rest / lr;
    let near = [quotient, quotient.next_up(), quotient.next_down()];
    near.into_iter().find(|factor| lr * factor == rest).unwrap_or(quotient)
}

fn muon_of(group: &Group) -> Result<Muon, Problem> {
    match group.options.algorithm {
        Algorithm::Muon(muon) => Ok(muon),
        _ => Err("has param_groups under `muon` that are not those of Muon".to_owned()),
    }
}

/// A group that AdamW steps as a whole.
fn without_muon(group: &Group) -> Result<ParamGroup, Problem> {
    let options = Muon { use_muon: false, adamw: adamw_of(group)?, ..Muon::default() };
    Ok(ParamGroup::new(group.options.lr, options))
}

impl Reader<'_> {
    /// Converts the states of PyTorch's two optimizers to one.
    pub(super) fn muon_and_adamw(
        &self,
        items: &Items,
        noted: Option<&Plain>,
    ) -> Result<Part, Problem> {
        let [muon, adamw] = pair(items).ok_or("is not an optimizer")?;
        let are_ours = is_ours(muon);
        let groups = [self.groups(muon)?, self.groups(adamw)?];
        let noted = [MUON, ADAMW].map(|key| noted.and_then(|names| names.get(key)));
        let names = [names_of(&groups[0], noted[0]), names_of(&groups[1], noted[1])];
        let params_are_numbers = names.contains(&None);
        let [muons, adamws] = &groups;
        let [by_muon, others] = match names {
            [Some(by_muon), Some(others)] => [by_muon, others],
            _ => {
                let count: usize = muons.iter().map(|group| group.numbers.len()).sum();
                [numbered(muons, 0), numbered(adamws, i64::try_from(count).unwrap_or(i64::MAX))]
            }
        };
        let mut state = self.states(muon, muons, &by_muon)?;
        state.extend(self.states(adamw, adamws, &others)?);
        let stepped_by_muon = by_muon.iter().flatten().cloned().collect();
        let param_groups = if are_ours && muons.len() == adamws.len() {
            let pairs = muons.iter().zip(adamws).zip(by_muon.into_iter().zip(others));
            let joined = pairs.map(|((muon, adamw), (mut params, others))| {
                params.extend(others);
                Ok(ParamGroupState { options: joined(muon, adamw)?, params })
            });
            joined.collect::<Result<_, Problem>>()?
        } else {
            let muons =
                muons.iter().map(|group| Ok(ParamGroup::new(group.options.lr, muon_of(group)?)));
            let all = muons.chain(adamws.iter().map(without_muon));
            let all = all.zip(by_muon.into_iter().chain(others));
            let all =
                all.map(|(options, params)| Ok(ParamGroupState { options: options?, params }));
            all.collect::<Result<_, Problem>>()?
        };
        Ok(Part::Optimizer(OptimizerPart {
            state,
            param_groups,
            params_are_numbers,
            adam_or_adamw: false,
            by_muon: stepped_by_muon,
        }))
    }
}
