//! The parameters from which an optimizer is built.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;
use tch::nn::{VarStore, Variables};

use crate::error::Result;
use crate::ffi;

/// The forms in which parameters are given to a fused optimizer: a `VarStore`, a list of tensors, or a list or map of
/// tensors with names, such as [`VarStore::variables`] returns.
///
/// Tensors without names are called by their index in the optimizer, `"0"`, `"1"` and so on, as PyTorch numbers them in
/// a `state_dict`.
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
    fn into_parameters(self) -> Source;
}

impl IntoParameters for &VarStore {
    fn into_parameters(self) -> Source {
        Source(Origin::Store(Store::new(self)))
    }
}

impl IntoParameters for Vec<Tensor> {
    fn into_parameters(self) -> Source {
        Source(Origin::List(self.into_iter().map(|tensor| (None, tensor)).collect()))
    }
}

impl IntoParameters for &[Tensor] {
    fn into_parameters(self) -> Source {
        self.iter().map(Tensor::shallow_clone).collect::<Vec<_>>().into_parameters()
    }
}

impl<const N: usize> IntoParameters for &[Tensor; N] {
    fn into_parameters(self) -> Source {
        self.as_slice().into_parameters()
    }
}

impl IntoParameters for &Vec<Tensor> {
    fn into_parameters(self) -> Source {
        self.as_slice().into_parameters()
    }
}

/// The parameters are in the order of their names.
impl IntoParameters for HashMap<String, Tensor> {
    fn into_parameters(self) -> Source {
        let mut named: Vec<_> = self.into_iter().collect();
        named.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        named.into_parameters()
    }
}

impl<N: Into<String>> IntoParameters for Vec<(N, Tensor)> {
    fn into_parameters(self) -> Source {
        Source(Origin::List(self.into_iter().map(|(name, t)| (Some(name.into()), t)).collect()))
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
pub struct Source(pub(crate) Origin);

#[derive(Debug)]
pub(crate) enum Origin {
    Store(Store),
    List(Vec<(Option<String>, Tensor)>),
}

/// A parameter that is being added to an optimizer.
#[derive(Debug)]
pub(crate) struct Named {
    /// `None` if it is called by its index in the optimizer.
    pub(crate) name: Option<String>,
    pub(crate) tensor: Tensor,
    /// The group of its path in tch.
    pub(crate) group: usize,
}

/// The variables of a `VarStore`, and the number of those that were taken.
#[derive(Debug)]
pub(crate) struct Store {
    variables: Arc<Mutex<Variables>>,
    taken: usize,
}

impl Store {
    pub(crate) fn new(vs: &VarStore) -> Self {
        Self { variables: vs.variables_.clone(), taken: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, Variables> {
        // A panic elsewhere leaves the map and the list valid.
        self.variables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether variables were added since the last [`taken`](Self::taken).
    pub(crate) fn has_more(&self) -> bool {
        self.lock().trainable_variables.len() > self.taken
    }

    /// The variables that were added since the last [`taken`](Self::taken).
    pub(crate) fn more(&self) -> Vec<Tensor> {
        let variables = self.lock();
        let added = variables.trainable_variables.iter().skip(self.taken);
        added.map(|var| var.tensor.shallow_clone()).collect()
    }

    /// The variables that were added since the last [`taken`](Self::taken), with their names.
    pub(crate) fn added(&self) -> Result<Vec<Named>> {
        let variables = self.lock();
        let (names, named): (Vec<_>, Vec<_>) =
            variables.named_variables.iter().map(|(n, t)| (n.clone(), t.shallow_clone())).unzip();
        let names: HashMap<_, _> = ffi::identities(&named)?.into_iter().zip(names).collect();
        let added: Vec<_> = variables.trainable_variables.iter().skip(self.taken).collect();
        let tensors: Vec<_> = added.iter().map(|var| var.tensor.shallow_clone()).collect();
        let identities = ffi::identities(&tensors)?;
        let added = tensors.into_iter().zip(identities).zip(added);
        let added = added.map(|((tensor, identity), var)| {
            let name = names.get(&identity).cloned();
            Named { name, tensor, group: var.group }
        });
        Ok(added.collect())
    }

    /// Records that `count` more variables are in the optimizer.
    pub(crate) fn taken(&mut self, count: usize) {
        self.taken += count;
    }
}
