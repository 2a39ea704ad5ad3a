//! Small tensors that require gradients.

use std::collections::BTreeMap;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

/// A leaf with these values.
pub fn leaf(values: &[f64], kind: Kind, device: Device) -> Tensor {
    Tensor::from_slice(values).to_kind(kind).to_device(device).set_requires_grad(true)
}

/// A leaf with random values.
pub fn random_leaf(device: Device, kind: Kind, size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, device)).to_kind(kind).set_requires_grad(true)
}

/// How a program gives a variable a second name.
#[derive(Clone, Copy, Debug)]
pub enum Tie {
    /// Into the map of the names.
    Insert,
    /// As another trainable variable.
    Add,
}

/// Each way.
pub const TIES: [Tie; 2] = [Tie::Insert, Tie::Add];

/// Gives a variable another name.
pub fn tie(vs: &VarStore, way: Tie, name: &str, variable: &Tensor) {
    match way {
        Tie::Insert => {
            let mut variables = vs.variables_.lock().unwrap();
            variables.named_variables.insert(name.to_owned(), variable.shallow_clone());
        }
        Tie::Add => drop(vs.root().add(name, variable.shallow_clone(), true)),
    }
}

/// A model with one weight that is called `head` and `embedding`.
pub fn tied(way: Tie, values: &[f64], kind: Kind, device: Device) -> (VarStore, Tensor) {
    let vs = VarStore::new(device);
    let w = vs.root().add("head", leaf(values, kind, device), true);
    tie(&vs, way, "embedding", &w);
    (vs, w)
}

/// The variables of a store, sorted by their names.
pub fn variables(vs: &VarStore) -> BTreeMap<String, Tensor> {
    vs.variables().into_iter().collect()
}
