//! The parameters from which an optimizer is built.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;
use tch::nn::{VarStore, Variables};

use crate::error::Result;
use crate::ffi;
use crate::variables::{Names, Variable, each_once};

/// The forms in which parameters are given to a fused optimizer: a `VarStore`, a list of tensors, or a list or map of
/// tensors with names, such as `VarStore::variables` returns.
///
/// Tensors without names are called by their index in the optimizer, `"0"`, `"1"` and so on, as PyTorch numbers them in
/// a `state_dict`. A tensor that a `VarStore` or a map has under several names, such as a tied weight, is one
/// parameter, as in PyTorch: it has the first of them in sorted order, a pattern that matches any of them matches it,
/// and its state is loaded by any of them. In a list, no tensor may be there twice.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::Sgd;
///
/// let [body, head] = [1f32, 2.0].map(|w| Tensor::from_slice(&[w]).set_requires_grad(true));
/// let mut opt = Sgd::default().build(vec![("body.weight", body), ("head.weight", head)], 0.1)?;
/// assert_eq!(opt.assign_group(1, &["head.*"])?, 1);
/// assert_eq!(opt.state_dict()?.param_groups[1].params, ["head.weight"]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub trait IntoParameters: sealed::Sealed {
    #[doc(hidden)]
    fn into_parameters(self) -> ParameterSource;
}

impl IntoParameters for &VarStore {
    fn into_parameters(self) -> ParameterSource {
        ParameterSource(Source::VarStore(TrackedVariables::new(self)))
    }
}

impl IntoParameters for Vec<Tensor> {
    fn into_parameters(self) -> ParameterSource {
        ParameterSource(Source::List(self.into_iter().map(|tensor| (None, tensor)).collect()))
    }
}

impl IntoParameters for &[Tensor] {
    fn into_parameters(self) -> ParameterSource {
        self.iter().map(Tensor::shallow_clone).collect::<Vec<_>>().into_parameters()
    }
}

impl<const N: usize> IntoParameters for &[Tensor; N] {
    fn into_parameters(self) -> ParameterSource {
        self.as_slice().into_parameters()
    }
}

impl IntoParameters for &Vec<Tensor> {
    fn into_parameters(self) -> ParameterSource {
        self.as_slice().into_parameters()
    }
}

/// The parameters are in the order of their names.
impl IntoParameters for HashMap<String, Tensor> {
    fn into_parameters(self) -> ParameterSource {
        ParameterSource(Source::Map(self))
    }
}

impl<N: Into<String>> IntoParameters for Vec<(N, Tensor)> {
    fn into_parameters(self) -> ParameterSource {
        ParameterSource(Source::List(
            self.into_iter().map(|(name, t)| (Some(name.into()), t)).collect(),
        ))
    }
}

mod sealed {
    use super::{HashMap, Tensor, VarStore};

    pub trait Sealed {}
    impl Sealed for &VarStore {}
    impl Sealed for Vec<Tensor> {}
    impl Sealed for &[Tensor] {}
    impl<const N: usize> Sealed for &[Tensor; N] {}
    impl Sealed for &Vec<Tensor> {}
    impl Sealed for HashMap<String, Tensor> {}
    impl<N: Into<String>> Sealed for Vec<(N, Tensor)> {}
}

/// The source of an optimizer's parameters.
#[derive(Debug)]
pub struct ParameterSource(pub(crate) Source);

#[derive(Debug)]
pub(crate) enum Source {
    VarStore(TrackedVariables),
    Map(HashMap<String, Tensor>),
    List(Vec<(Option<String>, Tensor)>),
}

impl Source {
    /// The parameters, those of a list or map in this group.
    pub(crate) fn parameters(self, group: usize) -> Result<Vec<Named>> {
        match self {
            Self::VarStore(variables) => Ok(variables.added(&HashSet::new())?.0),
            Self::Map(map) => {
                let named =
                    |Variable { names, tensor }| Named { names: Some(names), tensor, group };
                Ok(each_once(map)?.into_iter().map(named).collect())
            }
            Self::List(list) => {
                let named = |(name, tensor): (Option<String>, _)| Named {
                    names: name.map(Names::from),
                    tensor,
                    group,
                };
                Ok(list.into_iter().map(named).collect())
            }
        }
    }
}

/// A parameter that is being added to an optimizer.
#[derive(Debug)]
pub(crate) struct Named {
    /// `None` if it is called by its index in the optimizer.
    pub(crate) names: Option<Names>,
    pub(crate) tensor: Tensor,
    /// The group of its path in tch.
    pub(crate) group: usize,
}

/// The variables of a `VarStore`, and the number of those that were taken.
#[derive(Debug)]
pub(crate) struct TrackedVariables {
    variables: Arc<Mutex<Variables>>,
    taken: usize,
}

impl TrackedVariables {
    pub(crate) fn new(vs: &VarStore) -> Self {
        Self { variables: vs.variables_.clone(), taken: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, Variables> {
        // A panic elsewhere leaves the map and the list valid.
        self.variables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether variables were added since the last [`taken`](Self::taken).
    pub(crate) fn has_more(&self) -> bool {
        self.lock().trainable_variables.len() > self.taken
    }

    /// The number of names of all variables, trainable or not.
    #[cfg(feature = "distributed")]
    pub(crate) fn named(&self) -> usize {
        self.lock().named_variables.len()
    }

    /// The variables that [`added`](Self::added) returns. If it fails, one may be there twice, which does no harm
    /// before they are taken.
    pub(crate) fn more(&self, known: &HashSet<usize>) -> Vec<Tensor> {
        if let Ok((added, _)) = self.added(known) {
            return added.into_iter().map(|named| named.tensor).collect();
        }
        let variables = self.lock();
        let added = variables.trainable_variables.iter().skip(self.taken);
        added.map(|var| var.tensor.shallow_clone()).collect()
    }

    /// The variables that were added since the last [`taken`](Self::taken), each once and with its names, without those
    /// that are known by their identities. A variable that is added under a second name is listed again in tch. Returns
    /// them with the number of entries in tch's list.
    pub(crate) fn added(&self, known: &HashSet<usize>) -> Result<(Vec<Named>, usize)> {
        let variables = self.lock();
        let mut names = names(&variables)?;
        let added: Vec<_> = variables.trainable_variables.iter().skip(self.taken).collect();
        let tensors: Vec<_> = added.iter().map(|var| var.tensor.shallow_clone()).collect();
        let identities = ffi::identities(&tensors)?;
        let count = added.len();
        let (mut seen, mut list) = (known.clone(), Vec::with_capacity(count));
        for ((tensor, identity), var) in tensors.into_iter().zip(identities).zip(added) {
            // An undefined tensor has no identity. The optimizer refuses it.
            if identity == 0 || seen.insert(identity) {
                list.push(Named { names: names.remove(&identity), tensor, group: var.group });
            }
        }
        Ok((list, count))
    }

    /// Records that this number of further entries of tch's list are in the optimizer.
    pub(crate) fn taken(&mut self, count: usize) {
        self.taken += count;
    }

    /// The names of all variables, by their identities.
    pub(crate) fn names(&self) -> Result<HashMap<usize, Names>> {
        names(&self.lock())
    }
}

fn names(variables: &Variables) -> Result<HashMap<usize, Names>> {
    let all = variables.named_variables.iter();
    let all = each_once(all.map(|(name, tensor)| (name.clone(), tensor.shallow_clone())))?;
    let tensors: Vec<_> = all.iter().map(|variable| variable.tensor.shallow_clone()).collect();
    let names = all.into_iter().map(|variable| variable.names);
    Ok(ffi::identities(&tensors)?.into_iter().zip(names).collect())
}
