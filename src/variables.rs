//! The rule for tied weights: a variable that a model has under several names is one variable.
//!
//! It is listed once, under the first of its names in sorted order. Files have it under every name, and it is restored
//! from any of them. What a pattern says of one of its names holds for the variable.
//!
//! Variables are tied by handles of one tensor, as `shallow_clone` makes them. Two tensors that only share their
//! memory, as after `set_data`, are two variables, as in PyTorch: each has a gradient of its own.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lazy_static::lazy_static;
use tch::Tensor;
use tch::nn::VarStore;

use crate::error::Result;
use crate::ffi;

lazy_static! {
    /// The variables that have other numbers than their own for a while.
    static ref SWAPPED: Mutex<HashSet<usize>> = Mutex::default();
}

fn swapped() -> MutexGuard<'static, HashSet<usize>> {
    SWAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Variables in whose place other numbers are until this is dropped, such as their averages.
#[derive(Debug)]
pub(crate) struct Swapped {
    /// Kept alive, so that no other tensor gets their identities.
    variables: Vec<Tensor>,
    identities: Vec<usize>,
}

impl Swapped {
    /// Notes variables that are to have other numbers; `None` if one of them has already. Guards that were dropped in
    /// another order than the reverse of their making would leave the numbers of one there, and the variable's own
    /// would be lost.
    pub(crate) fn claim(variables: Vec<Tensor>) -> Result<Option<Self>> {
        let identities = ffi::identities(&variables)?;
        let mut swapped = swapped();
        if identities.iter().any(|identity| swapped.contains(identity)) {
            return Ok(None);
        }
        swapped.extend(&identities);
        Ok(Some(Self { variables, identities }))
    }

    /// Returns whether one of these variables has other numbers than its own.
    pub(crate) fn has_any<'t>(variables: impl IntoIterator<Item = &'t Tensor>) -> Result<bool> {
        if swapped().is_empty() {
            return Ok(false);
        }
        let variables: Vec<_> = variables.into_iter().map(Tensor::shallow_clone).collect();
        let identities = ffi::identities(&variables)?;
        let swapped = swapped();
        Ok(identities.iter().any(|identity| swapped.contains(identity)))
    }
}

impl Drop for Swapped {
    fn drop(&mut self) {
        let Self { variables: _alive, identities } = self;
        let mut swapped = swapped();
        for identity in identities {
            let _was_there = swapped.remove(identity);
        }
    }
}

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
#[cfg(feature = "insight")]
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

/// The parameters of an optimizer, borrowed from it or collected for the call.
#[derive(Debug)]
pub struct Parameters<'a>(List<'a>);

#[derive(Debug)]
enum List<'a> {
    Borrowed(&'a [Tensor]),
    Owned(Vec<Tensor>),
}

impl Parameters<'_> {
    /// Returns the parameters.
    pub fn as_slice(&self) -> &[Tensor] {
        match &self.0 {
            List::Borrowed(tensors) => tensors,
            List::Owned(tensors) => tensors,
        }
    }

    /// The list as an owned one. Clones handles, not data.
    pub(crate) fn into_owned(self) -> Vec<Tensor> {
        match self.0 {
            List::Borrowed(tensors) => tensors.iter().map(Tensor::shallow_clone).collect(),
            List::Owned(tensors) => tensors,
        }
    }
}

impl<'a> From<&'a [Tensor]> for Parameters<'a> {
    fn from(tensors: &'a [Tensor]) -> Self {
        Self(List::Borrowed(tensors))
    }
}

impl From<Vec<Tensor>> for Parameters<'_> {
    fn from(tensors: Vec<Tensor>) -> Self {
        Self(List::Owned(tensors))
    }
}
