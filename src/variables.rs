//! The rule for tied weights: a variable that a model has under several names is one variable.
//!
//! It is listed once, under the first of its names in sorted order. Files have it under every name, and it is restored
//! from any of them. What a pattern says of one of its names holds for the variable.
//!
//! Variables are tied by handles of one tensor, as `shallow_clone` makes them. Two tensors that only share their
//! memory, as after `set_data`, are two variables, as in PyTorch: each has a gradient of its own.

use std::collections::HashMap;

use tch::Tensor;
use tch::nn::VarStore;

use crate::error::Result;
use crate::ffi;

/// The names of a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Names {
    /// The first in sorted order, by which the variable is listed.
    pub(crate) first: String,
    /// All others, sorted.
    pub(crate) others: Vec<String>,
}

impl Names {
    /// Adds another name.
    pub(crate) fn add(&mut self, mut name: String) {
        if name < self.first {
            std::mem::swap(&mut name, &mut self.first);
        }
        let place = self.others.partition_point(|other| *other < name);
        self.others.insert(place, name);
    }

    /// All names, sorted.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.first).chain(&self.others)
    }
}

impl From<String> for Names {
    fn from(first: String) -> Self {
        Self { first, others: Vec::new() }
    }
}

/// A variable and its names.
#[derive(Debug)]
pub(crate) struct Variable {
    pub(crate) names: Names,
    pub(crate) tensor: Tensor,
}

/// Returns the variables of a `VarStore`, each once, in the order of their names.
pub(crate) fn variables(vs: &VarStore) -> Result<Vec<Variable>> {
    each_once(vs.variables())
}

/// Returns the variables of a `VarStore` for a report, each once, in the order of their names.
pub(crate) fn listed(vs: &VarStore) -> Vec<(String, Tensor)> {
    match variables(vs) {
        Ok(variables) => named(variables),
        // Only memory can be lacking. A report then lists every name.
        Err(_) => sorted(vs.variables()),
    }
}

/// Returns variables with the names by which they are listed.
pub(crate) fn named(variables: Vec<Variable>) -> Vec<(String, Tensor)> {
    variables.into_iter().map(|Variable { names, tensor }| (names.first, tensor)).collect()
}

/// Returns named tensors, each once, in the order of their names.
pub(crate) fn each_once(all: impl IntoIterator<Item = (String, Tensor)>) -> Result<Vec<Variable>> {
    let (names, tensors): (Vec<_>, Vec<_>) = sorted(all).into_iter().unzip();
    let identities = ffi::identities(&tensors)?;
    let mut places = HashMap::new();
    let mut variables: Vec<Variable> = Vec::with_capacity(tensors.len());
    for ((name, tensor), identity) in names.into_iter().zip(tensors).zip(identities) {
        // Undefined tensors have no identity, and are never the same.
        let known = places.get(&identity).filter(|_| identity != 0);
        if let Some(variable) = known.and_then(|&place: &usize| variables.get_mut(place)) {
            variable.names.add(name);
        } else {
            places.insert(identity, variables.len());
            variables.push(Variable { names: name.into(), tensor });
        }
    }
    Ok(variables)
}

fn sorted(all: impl IntoIterator<Item = (String, Tensor)>) -> Vec<(String, Tensor)> {
    let mut all: Vec<_> = all.into_iter().collect();
    all.sort_by(|(one, _), (other, _)| one.cmp(other));
    all
}
