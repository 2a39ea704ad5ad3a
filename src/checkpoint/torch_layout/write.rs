//! Converts the parts of a checkpoint to PyTorch's layout.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};

use tch::{Device, Kind, Tensor};
use torch_files::{Dtype, Storage, TensorRef, Value};

use super::KEY;
use super::optimizer::{ADAMW, MUON, split};
use crate::checkpoint::entry::TensorEntry;
use crate::checkpoint::part::{MODULE, OptimizerPart, Part, StatePart, WRITER};
use crate::dtype::dtype_of;
use crate::error::{Result, unsaveable};
use crate::ffi::{self, OutsideRegions};
use crate::optim::{EXPONENTS, ParamGroup, ParamGroupState, STEP, Saved as _};

/// A tensor of the file.
pub(crate) enum StorageSource<'a> {
    Kept(&'a TensorEntry),
    /// f32 numbers that are made of an entry when they are written, so that only one tensor of them is in memory at a
    /// time.
    Made(&'a TensorEntry, Box<dyn Fn() -> Result<Tensor> + 'a>),
}

impl StorageSource<'_> {
    /// Returns whether this rank has the elements.
    pub(crate) fn is_here(&self) -> bool {
        let (Self::Kept(entry) | Self::Made(entry, _)) = self;
        entry.is_here()
    }
}

impl Storage for StorageSource<'_> {
    fn size_in_bytes(&self) -> u64 {
        match self {
            Self::Kept(entry) => entry.size_in_bytes(),
            Self::Made(entry, _) => {
                entry.numel().saturating_mul(Kind::Float.elt_size_in_bytes()) as u64
            }
        }
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Kept(entry) => entry.write_to(out),
            Self::Made(_, make) => {
                let made = make().and_then(|made| TensorEntry::in_memory(&made));
                made.map_err(io::Error::other)?.write_to(out)
            }
        }
    }
}

impl fmt::Debug for StorageSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept(entry) => entry.fmt(f),
            Self::Made(entry, _) => write!(f, "Made({:?})", entry.size),
        }
    }
}

const ONLY_NUMBERS: &str = "its parameters have numbers and no names; restore it into an optimizer of named \
                            parameters, and save that";

/// The parts in PyTorch's layout.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    pub(crate) root: Value,
    /// The tensor of each storage, in the order of their keys.
    pub(crate) storages: Vec<StorageSource<'a>>,
    /// Whether optimizers have the names of their parameters in the place of PyTorch's numbers.
    by_name: bool,
}

impl<'a> Layout<'a> {
    /// Converts the parts, the parameters of optimizers by names or by numbers. Returns an error for a part that cannot
    /// be represented in Python.
    pub(crate) fn new(parts: &'a BTreeMap<String, Part>, by_name: bool) -> Result<Self> {
        let mut layout = Self { root: Value::None, storages: Vec::new(), by_name };
        let mut root = Vec::with_capacity(parts.len() + 1);
        let mut kinds = Vec::new();
        let mut names = Vec::new();
        let mut averages = Vec::new();
        for (name, part) in parts {
            let (kind, value) = layout.part(name, part)?;
            root.push((name.as_str().into(), value));
            if let Some(kind) = kind {
                kinds.push((name.as_str().into(), kind.into()));
            }
            if let Part::Optimizer(part) = part {
                match (by_name, part.params_are_numbers) {
                    (true, true) => return Err(unsaveable(name, ONLY_NUMBERS).into()),
                    (false, false) => names.push((name.as_str().into(), all_names_of(part))),
                    _ => {}
                }
            }
            if let Part::State(StatePart { values, beside_averages: Some(beside), .. }) = part {
                let beside = beside.keys().map(|name| name.as_str().into()).collect();
                let noted =
                    vec![("beside".into(), Value::List(beside)), ("values".into(), values.clone())];
                averages.push((name.as_str().into(), Value::Dict(noted)));
            }
        }
        let mut ours = vec![
            ("param_names".into(), Value::Dict(names)),
            ("parts".into(), Value::Dict(kinds)),
            ("writer".into(), WRITER.into()),
        ];
        if !averages.is_empty() {
            ours.push(("averages".into(), Value::Dict(averages)));
        }
        root.push((KEY.into(), Value::Dict(ours)));
        layout.root = Value::Dict(root);
        Ok(layout)
    }

    /// Converts the tensors of a model to a dict of them and nothing else.
    pub(crate) fn of_weights(tensors: &'a BTreeMap<String, TensorEntry>) -> Self {
        let mut layout = Self { root: Value::None, storages: Vec::new(), by_name: false };
        layout.root = layout.model(tensors);
        layout
    }

    /// Returns the kind of a part and its value.
    fn part(&mut self, name: &str, part: &'a Part) -> Result<(Option<&'static str>, Value)> {
        Ok(match part {
            Part::Model(tensors) => (Some("model"), self.model(tensors)),
            Part::State(StatePart { tensors, maybe, .. }) if !maybe.is_empty() => {
                (Some("model"), self.model(tensors))
            }
            Part::Optimizer(part) => (Some("optimizer"), self.optimizer(part)),
            Part::Scaler(state) => {
                let state = Value::of(state);
                let state = state.map_err(|error| unsaveable(name, error.to_string()))?;
                (Some("scaler"), state)
            }
            Part::State(StatePart { tensors, beside_averages: Some(beside), .. }) => {
                (Some("averages"), self.averages(tensors, beside))
            }
            Part::State(part) => (Some("state"), self.state(part)),
            Part::Tensor(entry) => (Some("tensor"), self.tensor(entry)),
            Part::Value(value) => (Some("value"), value.clone()),
            Part::Empty => (None, Value::Dict(Vec::new())),
            // Unreachable, because `save_as` refuses such parts.
            Part::Unknown(why) => return Err(unsaveable(name, why.as_str()).into()),
        })
    }

    fn model(&mut self, tensors: &'a BTreeMap<String, TensorEntry>) -> Value {
        let items = tensors.iter().map(|(name, entry)| (name.as_str().into(), self.tensor(entry)));
        Value::Dict(items.collect())
    }

    /// Converts averages of a model to the state of an `AveragedModel`.
    fn averages(
        &mut self,
        tensors: &'a BTreeMap<String, TensorEntry>,
        beside: &'a BTreeMap<String, TensorEntry>,
    ) -> Value {
        let averages = tensors
            .iter()
            .map(|(name, entry)| (format!("{MODULE}{name}").as_str().into(), self.tensor(entry)));
        let mut items: Vec<_> = averages.collect();
        items.extend(beside.iter().map(|(name, entry)| (name.as_str().into(), self.tensor(entry))));
        Value::Dict(items)
    }

    /// Converts the values and the tensors to one dict.
    fn state(&mut self, StatePart { tensors, values, .. }: &'a StatePart) -> Value {
        let mut items = Vec::new();
        if let Value::Map(fields) = values {
            items.extend(
                fields.iter().map(|(name, value)| (Value::Text(name.clone()), value.clone())),
            );
        }
        let tensors =
            tensors.iter().map(|(name, entry)| (name.as_str().into(), self.tensor(entry)));
        items.extend(tensors);
        Value::Dict(items)
    }

    /// Converts an optimizer, or the two that PyTorch has for Muon.
    fn optimizer(&mut self, part: &'a OptimizerPart) -> Value {
        match split(part) {
            Some((muon, adamw)) => Value::Dict(vec![
                (MUON.into(), self.state_dict(part, &muon)),
                (ADAMW.into(), self.state_dict(part, &adamw)),
            ]),
            None => self.state_dict(part, &part.param_groups),
        }
    }

    /// PyTorch numbers the parameters consecutively through all groups. Their names are stored at the root: next to the
    /// numbers, as `param_names`, they would prevent Python from adding groups without names. By name, they take the
    /// place of the numbers.
    fn state_dict(&mut self, part: &'a OptimizerPart, groups: &[ParamGroupState]) -> Value {
        let mut state = Vec::new();
        let mut param_groups = Vec::new();
        let mut number = 0;
        for group in groups {
            let mut params = Vec::with_capacity(group.params.len());
            for name in &group.params {
                let key = if self.by_name { name.as_str().into() } else { Value::Int(number) };
                if let Some(entries) = part.state.get(name) {
                    state.push((key.clone(), Value::Dict(self.states(entries))));
                }
                params.push(key);
                number += 1;
            }
            let ParamGroup { lr, algorithm } = group.options;
            let mut items = vec![("lr".into(), Value::Float(lr))];
            items.extend(algorithm.spec().torch_options(has_fused_kernels(part, group)));
            items.push(("params".into(), Value::List(params)));
            param_groups.push(Value::Dict(items));
        }
        Value::Dict(vec![
            ("state".into(), Value::Dict(state)),
            ("param_groups".into(), Value::List(param_groups)),
        ])
    }

    /// Converts the state of a parameter. Low-bit moments become f32, which PyTorch knows.
    fn states(&mut self, entries: &'a BTreeMap<String, Box<TensorEntry>>) -> Vec<(Value, Value)> {
        let counted_exactly = entries.get(STEP).is_some_and(|step| Kind::Int64 == step.kind);
        let codes =
            ["exp_avg", "exp_avg_sq", EXPONENTS].map(|key| entries.get(key).map(|it| &**it));
        let mut items = Vec::new();
        for (key, entry) in entries {
            let value = match (codes, key.as_str()) {
                ([Some(_), Some(_), Some(_)], EXPONENTS) => continue,
                ([Some(first), Some(second), Some(exponents)], "exp_avg" | "exp_avg_sq") => {
                    let place = usize::from(key == "exp_avg_sq");
                    self.made(entry, move || {
                        let [first, second, exponents] =
                            [first.to_tensor()?, second.to_tensor()?, exponents.to_tensor()?];
                        let numbers = ffi::codes_decode([&first, &second, &exponents])?;
                        Ok(numbers[place].shallow_clone())
                    })
                }
                _ if counted_exactly && [Kind::BFloat16, Kind::Int64].contains(&entry.kind) => self
                    .made(entry, || {
                        let _own = OutsideRegions::enter();
                        Ok(entry.to_tensor()?.f_to_kind(Kind::Float)?)
                    }),
                _ => self.tensor(entry),
            };
            items.push((key.as_str().into(), value));
        }
        items
    }

    /// Converts a tensor. Each gets a storage of its own.
    fn tensor(&mut self, entry: &'a TensorEntry) -> Value {
        self.stored(entry.kind, entry.size.clone(), StorageSource::Kept(entry))
    }

    fn made(&mut self, entry: &'a TensorEntry, make: impl Fn() -> Result<Tensor> + 'a) -> Value {
        let made = StorageSource::Made(entry, Box::new(make));
        self.stored(Kind::Float, entry.size.clone(), made)
    }

    fn stored(&mut self, kind: Kind, size: Vec<i64>, stored: StorageSource<'a>) -> Value {
        let storage = self.storages.len().to_string();
        self.storages.push(stored);
        // Files have the dtype of every tensor that an entry can be made of.
        let dtype = dtype_of(kind).unwrap_or(Dtype::Uint8);
        TensorRef::contiguous(storage, dtype, size).into()
    }
}

/// Returns the names of an optimizer's parameters, or of the two that PyTorch has for Muon.
fn all_names_of(part: &OptimizerPart) -> Value {
    match split(part) {
        Some((muon, adamw)) => {
            Value::Dict(vec![(MUON.into(), names_of(&muon)), (ADAMW.into(), names_of(&adamw))])
        }
        None => names_of(&part.param_groups),
    }
}

/// Returns the names of an optimizer's parameters in the order of their numbers.
fn names_of(groups: &[ParamGroupState]) -> Value {
    let names = |group: &ParamGroupState| {
        Value::List(group.params.iter().map(|name| name.as_str().into()).collect())
    };
    Value::List(groups.iter().map(names).collect())
}

/// Returns whether PyTorch's fused kernels can step the parameters of a group, judging by the dtypes and devices of
/// their states.
fn has_fused_kernels(part: &OptimizerPart, group: &ParamGroupState) -> bool {
    let anywhere = group.options.algorithm.spec().is_fused_on_gpus();
    let states = group.params.iter().filter_map(|name| part.state.get(name));
    let mut entries = states.flat_map(BTreeMap::values);
    entries.all(|entry| !entry.is_complex() && (anywhere || entry.device() == Device::Cpu))
}
