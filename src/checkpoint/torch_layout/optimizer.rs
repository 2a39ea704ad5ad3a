//! Conversion of PyTorch's optimizers.
//!
//! PyTorch numbers the parameters through all groups. Names are taken from those that this crate has recorded, or from
//! the `param_names` of a group; without either, the numbers remain and are matched by position when the state is
//! restored. FSDP and `torch.distributed.checkpoint` have the names in the place of the numbers, and in their flat
//! layout one dict with keys such as `state.weight.exp_avg` and `param_groups.weight.lr`.
//!
//! PyTorch does not save the name of the algorithm, so each of `optim/algorithms` says by which options it knows its
//! groups. The FusedAdam of apex counts the steps of a group instead of those of each parameter.
//!
//! For Muon PyTorch has two optimizers: a dict of their states, `muon` and `adamw`. A group of this crate becomes a
//! group of each, in the same place. Python may have groups that do not correspond; then each of them becomes a group
//! here.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use torch_files::{Dtype, TensorRef, TorchFile, Value};

use super::{Items, get};
use crate::checkpoint::entry::TensorEntry;
use crate::checkpoint::part::OptimizerPart;
use crate::error::{nearest, shown};
use crate::optim::{
    AdamW, Algorithm, Muon, ParamGroup, ParamGroupState, STEP, Saved as _, TorchGroup,
};

/// Why the objects are not a checkpoint.
pub(super) type Problem = String;

/// The file that has the tensors.
#[derive(Debug)]
pub(super) struct Tensors {
    pub(super) file: Arc<TorchFile>,
    /// The most parameters that an optimizer may have.
    pub(super) most: u64,
}

impl Tensors {
    /// Returns the entry of a tensor, if tch has its dtype.
    pub(super) fn entry(&self, tensor: &TensorRef) -> Option<TensorEntry> {
        TensorEntry::in_file(&self.file, tensor)
    }
}

/// A parameter group in PyTorch's layout.
struct PythonGroup {
    options: ParamGroup,
    /// The numbers of its parameters, or their names.
    params: Vec<Value>,
    /// The `param_names`, in the order of the parameters.
    names: Option<Vec<String>>,
    may_be_adamw: bool,
    is_fused_adam: bool,
    /// The steps of all of its parameters, which a FusedAdam counts.
    steps: Option<f64>,
}

/// Returns the names of the parameters in each group, which the groups have in the place of the numbers, or which this
/// crate or PyTorch has saved in addition to them; `None` if there are none, or their counts are not those of the
/// groups.
fn names_of(groups: &[PythonGroup], noted: Option<&Value>) -> Option<Vec<Vec<String>>> {
    let name = |param: &Value| param.text().map(str::to_owned);
    let own = groups.iter().map(|group| group.params.iter().map(name).collect()).collect();
    let noted = || noted.and_then(|names| names.to().ok());
    let beside = || groups.iter().map(|group| group.names.clone()).collect();
    let fit = |names: &Vec<Vec<String>>| {
        names.iter().map(Vec::len).eq(groups.iter().map(|group| group.params.len()))
    };
    Option::or_else(own, noted).or_else(beside).filter(fit)
}

/// The numbers of the parameters in each group as names, plus `offset`.
fn numbered(groups: &[PythonGroup], offset: i64) -> Vec<Vec<String>> {
    let name = |param: &Value| match param {
        Value::Int(number) => number.saturating_add(offset).to_string(),
        other => other.key_text().unwrap_or_default().to_string(),
    };
    groups.iter().map(|group| group.params.iter().map(name).collect()).collect()
}

impl Tensors {
    /// Converts an optimizer. `names` are those of the parameters in each group, if this crate has recorded them.
    pub(super) fn optimizer(
        &self,
        items: &Items,
        names: Option<&Value>,
    ) -> Result<OptimizerPart, Problem> {
        if is_pair(items) {
            return self.muon_and_adamw(items, names);
        }
        if is_flat(items) {
            return self.optimizer(&self.nested(items), names);
        }
        let groups = self.groups(items)?;
        let names = names_of(&groups, names);
        let params_are_numbers = names.is_none();
        let names = names.unwrap_or_else(|| numbered(&groups, 0));
        let state = self.states(items, &groups, &names)?;
        let adam_or_adamw = groups.iter().any(|group| group.may_be_adamw);
        let options = groups.iter().map(|group| group.options).zip(names);
        let param_groups: Vec<_> =
            options.map(|(options, params)| ParamGroupState { options, params }).collect();
        let is_muon =
            |group: &&ParamGroupState| matches!(group.options.algorithm, Algorithm::Muon(_));
        let by_muon = param_groups.iter().filter(is_muon).flat_map(|group| group.params.clone());
        Ok(OptimizerPart {
            by_muon: by_muon.collect(),
            others: BTreeMap::new(),
            state,
            param_groups,
            params_are_numbers,
            adam_or_adamw,
        })
    }

    /// Converts the flat layout of `torch.distributed.checkpoint` to the usual one. It has the options of each
    /// parameter and no groups, so that those with equal options become one.
    fn nested(&self, items: &Items) -> Vec<(Value, Value)> {
        type Entries = Vec<(Value, Vec<(Value, Value)>)>;
        let (mut states, mut options) = (Entries::new(), Entries::new());
        let mut places = [HashMap::new(), HashMap::new()];
        for (key, value) in items {
            let Some((is_state, name, key)) = key.text().and_then(flat_key) else { continue };
            let (found, places) = match is_state {
                true => (&mut states, &mut places[0]),
                false => (&mut options, &mut places[1]),
            };
            let place = *places.entry(name).or_insert_with(|| {
                found.push((name.into(), Vec::new()));
                found.len() - 1
            });
            let value = if is_state { value.clone() } else { self.plain(value) };
            found[place].1.push((key.into(), value));
        }
        let mut groups: Vec<(Vec<_>, Vec<Value>)> = Vec::new();
        let mut places = HashMap::new();
        for (name, mut options) in options {
            options.sort_by(|(one, _), (other, _)| one.text().cmp(&other.text()));
            let place = *places.entry(format!("{options:?}")).or_insert_with(|| {
                groups.push((options, Vec::new()));
                groups.len() - 1
            });
            groups[place].1.push(name);
        }
        let groups = groups.into_iter().map(|(mut group, params)| {
            group.push(("params".into(), Value::List(params)));
            Value::Dict(group)
        });
        let states = states.into_iter().map(|(name, state)| (name, Value::Dict(state)));
        vec![
            ("state".into(), Value::Dict(states.collect())),
            ("param_groups".into(), Value::List(groups.collect())),
        ]
    }

    /// Converts the groups of a state dict.
    fn groups(&self, items: &Items) -> Result<Vec<PythonGroup>, Problem> {
        match get(items, "param_groups") {
            Some(Value::List(groups)) => {
                let groups: Vec<_> =
                    groups.iter().map(|group| self.group(group)).collect::<Result<_, _>>()?;
                let count: usize = groups.iter().map(|group| group.params.len()).sum();
                if count as u64 > self.most {
                    return Err(format!("has {count} parameters, more than {}", self.most));
                }
                let params = || groups.iter().flat_map(|group| &group.params);
                let named = params().find(|param| param.text().is_some());
                let numbered = params().find(|param| param.text().is_none());
                if let (Some(name), Some(number)) = (named, numbered) {
                    let [name, number] = [name, number].map(shown_key);
                    return Err(format!(
                        "has parameters by names, such as {name}, and others by numbers, such as {number}"
                    ));
                }
                Ok(groups)
            }
            _ => Err("is not an optimizer".to_owned()),
        }
    }

    /// Converts the tensors of a state dict, by the names of the parameters in its groups.
    fn states(
        &self,
        items: &Items,
        groups: &[PythonGroup],
        names: &[Vec<String>],
    ) -> Result<BTreeMap<String, BTreeMap<String, Box<TensorEntry>>>, Problem> {
        let state = match get(items, "state") {
            Some(Value::Dict(state)) => state.as_slice(),
            // `torch.distributed.checkpoint` leaves out what is empty.
            None => &[],
            Some(_) => return Err("is not an optimizer".to_owned()),
        };
        let params = groups.iter().flat_map(|group| &group.params);
        let by_key: HashMap<_, _> = params.map(key_of).zip(names.iter().flatten()).collect();
        let fused = groups.iter().zip(names).filter(|(group, _)| group.is_fused_adam);
        let fused = fused.flat_map(|(group, names)| names.iter().map(|name| (name, group.steps)));
        let fused: HashMap<_, _> = fused.collect();
        let mut entries = BTreeMap::new();
        for (key, tensors) in state {
            let known = |key| by_key.get(&Some(key));
            // `torch.distributed.checkpoint` makes texts of numbers that are keys.
            let number = || key.text().and_then(|text| known((false, text.into())));
            let Some(name) = key_of(key).and_then(known).or_else(number) else {
                let names = by_key.keys().flatten();
                let names = names.filter_map(|(is_text, name)| is_text.then_some(&**name));
                let near = key.text().and_then(|key| nearest(key, names));
                let near = near
                    .map_or_else(String::new, |near| format!("; did you mean `{}`?", shown(near)));
                let key = shown_key(key);
                return Err(format!(
                    "has a state of the parameter {key}, which is in no group{near}"
                ));
            };
            let Value::Dict(tensors) = tensors else {
                let key = shown_key(key);
                return Err(format!("has a state of the parameter {key} that is not a dict"));
            };
            let mut state = self.state(tensors)?;
            if let Some(steps) = fused.get(name) {
                if state.contains_key(STEP) {
                    return Err(STEPS_OF_ONE.to_owned());
                }
                let steps = steps.map(|steps| Box::new(TensorEntry::number(steps as f32)));
                state.extend(steps.map(|steps| (STEP.to_owned(), steps)));
            }
            entries.insert(String::clone(name), state);
        }
        Ok(entries)
    }

    fn group(&self, group: &Value) -> Result<PythonGroup, Problem> {
        let Value::Dict(items) = group else {
            return Err("has a group that is not a dict".to_owned());
        };
        let list = |key: &str| match get(items, key) {
            Some(Value::List(list)) => Some(list),
            _ => None,
        };
        let params = list("params").ok_or("has a group without parameters")?;
        let params = params.iter().map(|param| match param {
            Value::Int(_) | Value::Text(_) => Ok(param.clone()),
            _ => Err("has a parameter without a number or a name".to_owned()),
        });
        let params = params.collect::<Result<Vec<_>, _>>()?;
        let names = list("param_names");
        let names = names.and_then(|names| {
            names.iter().map(|name| Some(name.key_text()?.to_string())).collect()
        });
        let plain = items.iter().filter(|(key, _)| !is_list_of_parameters(key));
        let plain: Vec<_> = plain.map(|(key, value)| (key.clone(), self.plain(value))).collect();
        let options =
            options_of(&plain).map_err(|problem| format!("its param_groups {problem}"))?;
        let is_fused_adam = TorchGroup(&plain).is_fused_adam();
        let may_be_adamw = may_be_adamw(items) || is_fused_adam;
        let steps = match get(&plain, STEP) {
            Some(Value::Int(steps)) => Some(*steps as f64),
            _ => None,
        };
        Ok(PythonGroup { options, params, names, may_be_adamw, is_fused_adam, steps })
    }

    /// Returns an option with the numbers of its tensors: a learning rate or betas can be tensors of one element, so
    /// that `torch.compile` does not treat them as constants. Anything else remains as it is.
    fn plain(&self, value: &Value) -> Value {
        let number = |tensor: &TensorRef| {
            let single = tensor.shape.iter().all(|&size| size == 1);
            let number = self.entry(tensor).filter(|_| single)?.item().ok()?;
            Some(match tensor.dtype {
                Dtype::Bool => Value::Bool(number != 0.0),
                Dtype::Uint8 | Dtype::Int8 | Dtype::Int16 | Dtype::Int32 | Dtype::Int64 => {
                    Value::Int(number as i64)
                }
                _ => Value::Float(number),
            })
        };
        let all = |items: &[Value]| items.iter().map(|item| self.plain(item)).collect();
        match value {
            Value::Tensor(tensor) => number(tensor).unwrap_or_else(|| value.clone()),
            Value::List(items) => Value::List(all(items)),
            Value::Tuple(items) => Value::Tuple(all(items)),
            value => value.clone(),
        }
    }

    /// Converts the state of one parameter. Tensors that do not exist yet are `None` in PyTorch.
    fn state(&self, tensors: &Items) -> Result<BTreeMap<String, Box<TensorEntry>>, Problem> {
        let mut entries = BTreeMap::new();
        for (key, value) in tensors {
            let entry = match value {
                Value::None => continue,
                Value::Tensor(tensor) => self.entry(tensor),
                // Older versions of PyTorch keep the step as a number.
                Value::Int(value) => Some(TensorEntry::number(*value as f32)),
                Value::Float(value) => Some(TensorEntry::number(*value as f32)),
                Value::Opaque(what) => return Err(format!("has {what} in a parameter's state")),
                _ => None,
            };
            let (Value::Text(key), Some(entry)) = (key, entry) else {
                return Err("has something other than tensors in a parameter's state".to_owned());
            };
            entries.insert(key.to_string(), Box::new(entry));
        }
        Ok(entries)
    }

    /// Converts the states of PyTorch's two optimizers to one.
    fn muon_and_adamw(
        &self,
        items: &Items,
        noted: Option<&Value>,
    ) -> Result<OptimizerPart, Problem> {
        let [muon, adamw] = two_states(items).ok_or("is not an optimizer")?;
        let are_ours = is_ours(muon);
        let groups = [self.groups(muon)?, self.groups(adamw)?];
        let noted = [MUON, ADAMW].map(|key| noted.and_then(|names| names.get(key)));
        let names = [names_of(&groups[0], noted[0]), names_of(&groups[1], noted[1])];
        let params_are_numbers = names.contains(&None);
        let [muons, adamws] = &groups;
        let [by_muon, others] = match names {
            [Some(by_muon), Some(others)] => [by_muon, others],
            _ => {
                let count: usize = muons.iter().map(|group| group.params.len()).sum();
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
        Ok(OptimizerPart {
            state,
            param_groups,
            params_are_numbers,
            adam_or_adamw: false,
            by_muon: stepped_by_muon,
            others: BTreeMap::new(),
        })
    }
}

/// Why the steps of DeepSpeed's FusedAdam are not read.
const STEPS_OF_ONE: &str = "is a fused optimizer whose steps are saved for each parameter, such as DeepSpeed's \
     FusedAdam, which counts only those of one parameter in each group: the steps of the others are not in the file";

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
fn two_states(items: &Items) -> Option<[&Items; 2]> {
    let state_of = |key: &str| match get(items, key) {
        Some(Value::Dict(state)) if get(state, "param_groups").is_some() => Some(state.as_slice()),
        _ => None,
    };
    Some([state_of(MUON)?, state_of(ADAMW)?])
}

/// Returns whether a dict has the states of both optimizers, and nothing else.
pub(super) fn is_pair(items: &Items) -> bool {
    items.len() == 2 && two_states(items).is_some()
}

/// Returns whether a dict has the groups of an optimizer and nothing else, as of one without a state. Beside other
/// entries, groups are a value like any other.
pub(super) fn has_groups(items: &Items) -> bool {
    let has_params =
        |group: &Value| matches!(group, Value::Dict(items) if get(items, "params").is_some());
    items.len() == 1
        && matches!(get(items, "param_groups"), Some(Value::List(groups))
        if !groups.is_empty() && groups.iter().all(has_params))
}

/// Returns whether a dict is an optimizer in the flat layout of `torch.distributed.checkpoint`.
pub(super) fn is_flat(items: &Items) -> bool {
    let mut has_options = false;
    let is_flat = |(key, _): &(Value, Value)| {
        let found = key.text().and_then(flat_key);
        has_options |= found.is_some_and(|(is_state, ..)| !is_state);
        found.is_some()
    };
    items.iter().all(is_flat) && has_options
}

/// Divides a key of the flat layout: whether it is of a state or of options, the name of the parameter, and the key in
/// its state or its options.
fn flat_key(key: &str) -> Option<(bool, &str, &str)> {
    let of = |prefix| key.strip_prefix(prefix)?.rsplit_once('.');
    let state = of("state.").map(|(name, key)| (true, name, key));
    state.or_else(|| of("param_groups.").map(|(name, key)| (false, name, key)))
}

/// Returns whether this crate has saved the groups, and has added the options that PyTorch does not have.
fn is_ours(state: &Items) -> bool {
    let has_option =
        |group: &Value| matches!(group, Value::Dict(items) if get(items, "use_muon").is_some());
    matches!(get(state, "param_groups"), Some(Value::List(groups)) if groups.iter().all(has_option))
}

fn adamw_of(group: &PythonGroup) -> Result<AdamW, Problem> {
    match group.options.algorithm {
        Algorithm::AdamW(adamw) => Ok(adamw),
        _ => Err("has param_groups under `adamw` that are not those of AdamW".to_owned()),
    }
}

/// Joins the options of a group of Muon and one of AdamW.
fn joined(muon: &PythonGroup, adamw: &PythonGroup) -> Result<ParamGroup, Problem> {
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

fn muon_of(group: &PythonGroup) -> Result<Muon, Problem> {
    match group.options.algorithm {
        Algorithm::Muon(muon) => Ok(muon),
        _ => Err("has param_groups under `muon` that are not those of Muon".to_owned()),
    }
}

/// A group that AdamW steps as a whole.
fn without_muon(group: &PythonGroup) -> Result<ParamGroup, Problem> {
    let options = Muon { use_muon: false, adamw: adamw_of(group)?, ..Muon::default() };
    Ok(ParamGroup::new(group.options.lr, options))
}

/// Reads the options of a group, without its parameters, and infers the algorithm from their names.
fn options_of(group: &Items) -> Result<ParamGroup, String> {
    let algorithm = Algorithm::name_in(TorchGroup(group))?;
    let is_option = |(key, value): &&(Value, Value)| match key {
        // PyTorch's default.
        Value::Text(name) if **name == *"adjust_lr_fn" => *value != Value::None,
        _ => true,
    };
    let options = group.iter().filter(is_option);
    let options = Value::Dict(options.cloned().collect());
    let Ok(Value::Map(mut options)) = options.into_plain() else {
        return Err("have a tensor among their options".to_owned());
    };
    options.push(("algorithm".into(), algorithm.into()));
    Value::map(options).to().map_err(|error| error.to_string())
}

/// Shows the number or the name of a parameter in a message.
fn shown_key(key: &Value) -> String {
    match (key.text(), key.key_text()) {
        (Some(name), _) => format!("`{}`", shown(name)),
        (None, Some(number)) => shown(&number),
        (None, None) => "whose key is an object".to_owned(),
    }
}

/// Returns whether a key of a group is that of its parameters or of their names.
fn is_list_of_parameters(key: &Value) -> bool {
    matches!(key.text(), Some("params" | "param_names"))
}

/// Returns whether a group of Adam may in fact be one of AdamW. Before PyTorch 2.7 both had the same options.
fn may_be_adamw(items: &Items) -> bool {
    let has = |name: &str| get(items, name).is_some();
    has("amsgrad") && !has("decoupled_weight_decay")
}

/// Returns a key of a state, which is equal to the number or the name that the groups have for the parameter: whether
/// it is a text, and the text.
fn key_of(key: &Value) -> Option<(bool, Arc<str>)> {
    Some((matches!(key, Value::Text(_)), key.key_text()?))
}
