//! Conversion of the parameter groups of PyTorch's optimizers.
//!
//! PyTorch does not save the name of the algorithm, so it is inferred from the options: `lr_decay` makes Adagrad,
//! `amsgrad` makes Adam or, with a true `decoupled_weight_decay`, AdamW, `momentum` with `dampening` makes SGD, and
//! `centered` makes RMSprop, and `ns_steps` makes Muon. `betas` without `eps` make Lion, which PyTorch does not have.

use super::plain;
use crate::checkpoint::pickle::{Value, get};
use crate::checkpoint::plain::Plain;
use crate::optim::{
    Adagrad, Adam, AdamW, AdjustLr, Algorithm, Lion, Muon, ParamGroup, RmsProp, Sgd,
};

type Items = Vec<(Value, Value)>;

/// Reads the options of a group, without its parameters, and infers the algorithm from their names.
pub(super) fn from_python(group: &[(Value, Value)]) -> Result<ParamGroup, String> {
    let has = |name: &str| get(group, name).is_some();
    let is_true = |name: &str| get(group, name) == Some(&Value::Bool(true));
    let algorithm = match () {
        () if has("lr_decay") => "Adagrad",
        // NAdam and RAdam have `decoupled_weight_decay`, too, but no `amsgrad`.
        () if has("amsgrad") && is_true("decoupled_weight_decay") => "AdamW",
        () if has("amsgrad") => "Adam",
        () if has("momentum") && has("dampening") => "Sgd",
        () if has("centered") => "RmsProp",
        () if has("ns_steps") => "Muon",
        () if has("betas") && !has("eps") => "Lion",
        () => {
            let known = "are not those of Adam, AdamW, SGD, Adagrad, RMSprop, Lion or Muon";
            return Err(known.to_owned());
        }
    };
    let is_option = |(key, value): &&(Value, Value)| match key {
        // PyTorch's default.
        Value::Str(name) if name == "adjust_lr_fn" => *value != Value::None,
        _ => true,
    };
    let options = group.iter().filter(is_option);
    let options = plain::from_python(&Value::Dict(options.cloned().collect()));
    let Some(Plain::Map(mut options)) = options else {
        return Err("have a tensor among their options".to_owned());
    };
    options.push(("algorithm".to_owned(), Plain::Text(algorithm.to_owned())));
    Plain::map(options).read().map_err(|error| error.to_string())
}

/// Whether a key of a group is that of its parameters or of their names.
pub(super) fn is_list_of_parameters(key: &Value) -> bool {
    matches!(key, Value::Str(name) if name == "params" || name == "param_names")
}

/// Whether a group of Adam may in fact be one of AdamW. Before PyTorch 2.7 both had the same options.
pub(super) fn may_be_adamw(items: &[(Value, Value)]) -> bool {
    let has = |name: &str| get(items, name).is_some();
    has("amsgrad") && !has("decoupled_weight_decay")
}

/// Returns the options of a group, including those that only PyTorch has.
///
/// PyTorch loads all options from the file, including `fused`. An optimizer that was built with `fused=True` then fails
/// with a scaler if a group is not fused. Conversely, an optimizer without `fused=True` works and uses the fused
/// kernels, as with any file saved by a fused optimizer in Python. Therefore `fused` is true wherever the kernels
/// exist.
pub(super) fn to_python(group: &ParamGroup, has_fused_kernels: bool) -> Items {
    let ParamGroup { lr, algorithm } = *group;
    let mut items = vec![float("lr", lr)];
    match algorithm {
        Algorithm::AdamW(config) => items.extend(adam(&config, true)),
        Algorithm::Adam(Adam { betas, eps, weight_decay, amsgrad, maximize }) => {
            items.extend(adam(&AdamW { betas, eps, weight_decay, amsgrad, maximize }, false));
        }
        Algorithm::Sgd(Sgd { momentum, dampening, weight_decay, nesterov, maximize }) => {
            items.push(float("momentum", momentum));
            items.push(float("dampening", dampening));
            items.push(float("weight_decay", weight_decay));
            items.push(flag("nesterov", nesterov));
            items.push(flag("maximize", maximize));
        }
        Algorithm::Adagrad(config) => {
            let Adagrad { lr_decay, weight_decay, initial_accumulator_value, eps, maximize } =
                config;
            items.push(float("lr_decay", lr_decay));
            items.push(float("eps", eps));
            items.push(float("weight_decay", weight_decay));
            items.push(float("initial_accumulator_value", initial_accumulator_value));
            items.push(flag("maximize", maximize));
        }
        Algorithm::RmsProp(config) => {
            items.extend(rmsprop(&config));
            return items;
        }
        Algorithm::Lion(Lion { betas: (first, second), weight_decay, maximize }) => {
            items.push(pair("betas", first, second));
            items.push(float("weight_decay", weight_decay));
            items.push(flag("maximize", maximize));
            return items;
        }
        Algorithm::Muon(config) => {
            items.extend(muon(&config));
            return items;
        }
    }
    items.push(flag("differentiable", false));
    items.push(("foreach".into(), Value::None));
    items.push(("fused".into(), if has_fused_kernels { Value::Bool(true) } else { Value::None }));
    items
}

fn adam(config: &AdamW, decoupled: bool) -> Items {
    let AdamW { betas, eps, weight_decay, amsgrad, maximize } = *config;
    vec![
        pair("betas", betas.0, betas.1),
        float("eps", eps),
        float("weight_decay", weight_decay),
        flag("amsgrad", amsgrad),
        flag("maximize", maximize),
        flag("capturable", false),
        flag("decoupled_weight_decay", decoupled),
    ]
}

/// PyTorch has no fused RMSprop, and no option for it.
fn rmsprop(config: &RmsProp) -> Items {
    let RmsProp { alpha, eps, weight_decay, momentum, centered, maximize } = *config;
    vec![
        float("momentum", momentum),
        float("alpha", alpha),
        float("eps", eps),
        flag("centered", centered),
        float("weight_decay", weight_decay),
        flag("capturable", false),
        ("foreach".into(), Value::None),
        flag("maximize", maximize),
        flag("differentiable", false),
    ]
}

/// The options of PyTorch's Muon, and those that only this crate has. PyTorch keeps them.
fn muon(config: &Muon) -> Items {
    let Muon { momentum, nesterov, weight_decay, eps, ns_steps, .. } = *config;
    let (a, b, c) = config.ns_coefficients;
    let adjust = match config.adjust_lr_fn {
        AdjustLr::Original => "original",
        AdjustLr::MatchRmsAdamW => "match_rms_adamw",
    };
    vec![
        float("weight_decay", weight_decay),
        float("momentum", momentum),
        flag("nesterov", nesterov),
        ("ns_coefficients".into(), Value::Tuple([a, b, c].map(Value::Float).to_vec())),
        float("eps", eps),
        ("ns_steps".into(), Value::Int(ns_steps.into())),
        ("adjust_lr_fn".into(), adjust.into()),
        flag("use_muon", config.use_muon),
        float("adamw_lr_factor", config.adamw_lr_factor),
    ]
}

fn pair(name: &str, first: f64, second: f64) -> (Value, Value) {
    (name.into(), Value::Tuple(vec![Value::Float(first), Value::Float(second)]))
}

fn float(name: &str, value: f64) -> (Value, Value) {
    (name.into(), Value::Float(value))
}

fn flag(name: &str, value: bool) -> (Value, Value) {
    (name.into(), Value::Bool(value))
}
