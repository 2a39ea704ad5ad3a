//! Gradients that an `update` found and that no step has used, each with the scale by which it was multiplied.
//!
//! A step divides them by that scale, which stays on its device, and not by the present one. Which parameters there are
//! is known from the graphs of the losses that were scaled. A graph is searched once: those of later iterations are
//! recognized by a mark, so that a loop whose optimizers all step before `update` pays nothing.
//!
//! Whether a backward has added to such a gradient is known from its version, and whether the scale was another one by
//! then only where the host has both.

use std::collections::{HashMap, HashSet};

use tch::Tensor;

use crate::error::{Error, GradientError, Result};
use crate::ffi::{self, Gradient, Snapshot, Watched};
use crate::gradients::{Gradients, IdentityMap};
use crate::scale::Number;
use crate::scaler::iteration::{Key, key};

/// By which scale a gradient was multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    /// By the present one, as far as the host knows.
    Now,
    /// By the one with this index.
    By(usize),
    /// Parts of it by different ones, unless nothing was left of the first.
    Mixed,
}

impl Made {
    fn index(self) -> Option<usize> {
        match self {
            Self::By(scale) => Some(scale),
            Self::Now | Self::Mixed => None,
        }
    }
}

/// The scales of the gradients of one optimizer.
#[derive(Debug)]
pub(crate) enum Scales<'a> {
    Present(&'a Number),
    Earlier(Box<Number>),
    /// Each scale with the indices of its gradients.
    Several(Vec<(Number, Vec<usize>)>),
}

/// The parameters that scaled losses have reached.
#[derive(Debug, Default)]
pub(super) struct Reached {
    /// Of graphs that were searched.
    marks: Vec<u64>,
    parameters: IdentityMap<Watched>,
}

impl Reached {
    /// The number of graphs that are recognized. A training has a few losses.
    const MARKS: usize = 16;

    /// Searches the graph of a loss, unless one like it was searched.
    pub(super) fn note(&mut self, loss: &Tensor) -> Result<()> {
        let mark = ffi::loss_mark(loss);
        if self.marks.contains(&mark) {
            return Ok(());
        }
        let leaves = ffi::other_leaves(loss, &[])?;
        let identities = ffi::identities(&leaves)?;
        self.parameters.extend(identities.into_iter().zip(leaves.iter().map(Watched::new)));
        if self.marks.len() == Self::MARKS {
            // A mark has the identity of a parameter, which is unique as long as the parameter is watched.
            self.marks.clear();
            self.parameters.retain(|_, parameter| parameter.get().is_ok_and(|it| it.defined()));
        }
        self.marks.push(mark);
        Ok(())
    }

    /// Whether all of them that still exist are among these.
    pub(super) fn is_within(&self, identities: &IdentityMap<()>) -> bool {
        let is_dead = |parameter: &Watched| parameter.get().is_ok_and(|it| !it.defined());
        let mut all = self.parameters.iter();
        all.all(|(identity, parameter)| identities.contains_key(identity) || is_dead(parameter))
    }

    /// Those that still exist.
    pub(super) fn alive(&self) -> Result<Vec<Tensor>> {
        let mut all = self.parameters.values().map(Watched::get).collect::<Result<Vec<_>>>()?;
        all.retain(Tensor::defined);
        Ok(all)
    }
}

/// The gradients.
#[derive(Debug)]
pub(crate) struct Carried {
    parameters: Vec<Watched>,
    /// In the order of the parameters, like `made` and `rests`.
    snapshot: Snapshot,
    made: Vec<Made>,
    /// A flag on the device of each gradient whose scale the host knows: zero if nothing was left of it when it was
    /// carried or when a loss was scaled.
    rests: Vec<Option<Tensor>>,
    scales: Vec<Number>,
    /// A loss was scaled since the update.
    is_scaled: bool,
}

impl Carried {
    /// Carries gradients, each with its parameter and the flag from before, if any; `None` if there are none.
    fn new(all: Vec<(Tensor, Made, Option<Tensor>)>, scales: &[Number]) -> Result<Option<Self>> {
        if all.is_empty() {
            return Ok(None);
        }
        let mut used: Vec<_> = all.iter().filter_map(|(_, made, _)| made.index()).collect();
        used.sort_unstable();
        used.dedup();
        let mut carried = Self {
            parameters: Vec::new(),
            snapshot: Snapshot::default(),
            made: Vec::new(),
            rests: Vec::new(),
            scales: used.iter().map(|&index| scales[index].shallow_clone()).collect(),
            is_scaled: false,
        };
        let mut parameters = Vec::new();
        for (parameter, made, before) in all {
            let made = match made {
                Made::By(scale) => Made::By(used.partition_point(|&index| index < scale)),
                made => made,
            };
            let is_known = made.index().is_none_or(|scale| carried.scales[scale].known().is_some());
            let rest = is_known.then(|| ffi::gradient_rest(&parameter, before.as_ref()));
            carried.rests.push(rest.transpose()?);
            carried.made.push(made);
            carried.parameters.push(Watched::new(&parameter));
            parameters.push(parameter);
        }
        carried.snapshot = Snapshot::of(&parameters)?;
        Ok(Some(carried))
    }

    /// The parameters, of which those that no longer exist are undefined.
    fn parameters(&self) -> Result<Vec<Tensor>> {
        self.parameters.iter().map(Watched::get).collect()
    }

    /// The places of the gradients.
    fn places(&self) -> HashMap<Key, usize> {
        let all = self.snapshot.iter().enumerate();
        all.filter_map(|(at, gradient)| Some((key(gradient)?, at))).collect()
    }

    /// By which scale the gradient at a place, which is `now` described like this, was multiplied. It can still be that
    /// nothing was left of a mixed one when a backward added to it; see `rests`.
    fn made(&self, at: usize, now: &Gradient, present: &Number) -> Made {
        let (before, made) = (self.snapshot[at].version(), self.made[at]);
        // Before a loss is scaled, only the program changes gradients, for instance by clipping.
        if now.version() == before || !self.is_scaled {
            return made;
        }
        // The first of several changes may have zeroed it, and what others change has their changes, too.
        if now.version().wrapping_sub(before) != 1 || now.is_shared() {
            return Made::Now;
        }
        match made {
            // Unscaled gradients whose step was left out are often not zeroed, and are small beside scaled ones.
            Made::By(scale) if self.scales[scale].is_one() => Made::Now,
            Made::By(scale) => match (self.scales[scale].known(), present.known()) {
                (Some(one), Some(other)) if one == other => made,
                (Some(_), Some(_)) => Made::Mixed,
                _ => Made::Now,
            },
            Made::Now | Made::Mixed => made,
        }
    }

    /// The flag that says whether something is left of the gradient at a place.
    fn rest(&self, at: usize, now: &Gradient, parameter: &Tensor) -> Result<Option<Tensor>> {
        let before = self.rests[at].as_ref();
        match before.filter(|_| now.version() != self.snapshot[at].version()) {
            Some(before) => Ok(Some(ffi::gradient_rest(parameter, Some(before))?)),
            None => Ok(before.map(Tensor::shallow_clone)),
        }
    }

    /// Notes what has become of the gradients when a loss is scaled: later changes may come from its backward.
    pub(super) fn note(&mut self, present: &Number) -> Result<()> {
        let parameters = self.parameters()?;
        let mut now = Snapshot::of(&parameters)?;
        for at in 0..now.len() {
            if key(&now[at]).is_none() || key(&now[at]) != key(&self.snapshot[at]) {
                self.made[at] = Made::Now;
            } else if now[at].version() != self.snapshot[at].version() {
                let rest = self.rest(at, &now[at], &parameters[at])?;
                self.made[at] = self.made(at, &now[at], present);
                self.rests[at] = rest;
                self.snapshot.exchange(&mut now, at);
            }
        }
        self.is_scaled = true;
        Ok(())
    }

    /// The scales of the gradients of an optimizer. Fails if one of them is mixed; on a GPU it synchronizes before.
    pub(super) fn scales_of<'a>(
        &self,
        gradients: &Gradients<'_>,
        present: &'a Number,
    ) -> Result<Scales<'a>> {
        let places = self.places();
        let mut parts: Vec<(Made, Vec<usize>)> = Vec::new();
        for (index, gradient) in gradients.snapshot().iter().enumerate() {
            if !gradient.is_used() {
                continue;
            }
            let mut made = Made::Now;
            if let Some(&at) = key(gradient).and_then(|key| places.get(&key)) {
                made = self.made(at, gradient, present);
                if made == Made::Mixed {
                    let rest = self.rest(at, gradient, &gradients.parameters()[index])?;
                    if ffi::any_nonzero(&rest.iter().collect::<Vec<_>>())? {
                        let parameter = gradients.describe(index);
                        return Err(Error::Gradient(GradientError::MixedScales { parameter }));
                    }
                    made = Made::Now;
                }
            }
            match parts.iter_mut().find(|(known, _)| *known == made) {
                Some((_, indices)) => indices.push(index),
                None => parts.push((made, vec![index])),
            }
        }
        let number = |made: &Made| match made.index() {
            Some(scale) => self.scales[scale].shallow_clone(),
            None => present.shallow_clone(),
        };
        Ok(match parts.as_slice() {
            [] | [(Made::Now, _)] => Scales::Present(present),
            [(made, _)] => Scales::Earlier(Box::new(number(made))),
            _ => {
                let parts = parts.into_iter();
                Scales::Several(parts.map(|(made, indices)| (number(&made), indices)).collect())
            }
        })
    }
}

/// Collects the gradients that are to be carried over the end of an iteration.
#[derive(Debug)]
pub(super) struct Collection<'a> {
    /// The present scale, and whether it may change.
    present: &'a Number,
    changes: bool,
    before: Option<&'a Carried>,
    scales: Vec<Number>,
    kept: Option<Made>,
    one: Option<Made>,
    all: Vec<(Tensor, Made, Option<Tensor>)>,
}

/// What the records of an iteration have done with a gradient.
#[derive(Clone, Copy, Debug)]
pub(super) enum Use<'a> {
    /// In no record of this iteration.
    None,
    /// In a record that has unscaled it.
    Unscaled,
    /// In a record of a step, which has left it scaled by this number, or by the present scale.
    Scaled(Option<&'a Number>),
    /// In a record of a step, which has left it unscaled.
    Stepped,
}

impl<'a> Collection<'a> {
    pub(super) fn new(before: Option<&'a Carried>, present: &'a Number, changes: bool) -> Self {
        let scales = before.map_or(&[][..], |before| &before.scales);
        let scales = scales.iter().map(Number::shallow_clone).collect();
        Self { present, changes, before, scales, kept: None, one: None, all: Vec::new() }
    }

    /// Looks at the gradients of these parameters and of those that have been carried so far.
    pub(super) fn add(
        &mut self,
        parameters: impl IntoIterator<Item = Tensor>,
        used: impl Fn(&Gradient) -> Use<'a>,
    ) -> Result<()> {
        let mut all = self.before.map_or(Ok(Vec::new()), Carried::parameters)?;
        all.extend(parameters);
        let places = self.before.map(Carried::places).unwrap_or_default();
        let mut seen = HashSet::new();
        for (gradient, parameter) in ffi::gradients_inspect(&all)?.iter().zip(all) {
            let Some(key) = key(gradient) else { continue };
            if !gradient.is_used() || !seen.insert(key) {
                continue;
            }
            let carried = self.before.zip(places.get(&key).copied());
            let (made, rest) = match (used(gradient), carried) {
                (Use::Unscaled, _) => (self.one()?, None),
                (Use::Scaled(Some(scale)), _) => (self.push(scale.shallow_clone()), None),
                (Use::Stepped, _) => (Made::Now, None),
                (Use::None, Some((before, at))) => match before.made(at, gradient, self.present) {
                    Made::Now => (self.kept()?, None),
                    made => (made, before.rest(at, gradient, &parameter)?),
                },
                (Use::None | Use::Scaled(None), _) => (self.kept()?, None),
            };
            if made != Made::Now {
                self.all.push((parameter, made, rest));
            }
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Result<Option<Carried>> {
        Carried::new(self.all, &self.scales)
    }

    fn push(&mut self, scale: Number) -> Made {
        self.scales.push(scale);
        Made::By(self.scales.len() - 1)
    }

    /// By a copy of the present scale, if that may change.
    fn kept(&mut self) -> Result<Made> {
        if !self.changes {
            return Ok(Made::Now);
        }
        if let Some(made) = self.kept {
            return Ok(made);
        }
        let made = self.push(self.present.kept()?);
        Ok(*self.kept.insert(made))
    }

    /// By one, as gradients that are unscaled.
    fn one(&mut self) -> Result<Made> {
        if let Some(made) = self.one {
            return Ok(made);
        }
        let made = self.push(Number::one(self.present.tensor().device())?);
        Ok(*self.one.insert(made))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use tch::{Device, Kind};

    use super::*;
    use crate::optim::Sgd;
    use crate::scaler::{GradScaler, GradScalerConfig};

    /// A weight with a gradient, and the loss that gave it.
    fn weight() -> (Tensor, Tensor) {
        let w = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let loss = w.sum(None);
        (w, loss)
    }

    #[test]
    fn no_parameter_is_kept_alive() {
        let config = GradScalerConfig { growth_interval: 1, ..Default::default() };
        let mut scaler = config.build(Device::Cpu).unwrap();
        let watched = {
            let ((a, of_a), (b, of_b)) = (weight(), weight());
            let mut opt = Sgd::default().build(&[a.shallow_clone()], 0.5).unwrap();
            scaler.backward(&(of_a + of_b)).unwrap();
            scaler.step(&mut opt).unwrap();
            scaler.update().unwrap();
            assert_eq!(carried(&scaler), 2);
            [a, b].map(|w| Watched::new(&w))
        };
        for watched in watched {
            assert!(!watched.get().unwrap().defined());
        }
    }

    #[test]
    fn nothing_is_carried_while_the_scale_stays_or_once_it_is_stepped_with() {
        let config = GradScalerConfig { growth_interval: 2, ..Default::default() };
        let mut scaler = config.build(Device::Cpu).unwrap();
        let mut kept = Vec::new();
        let (b, of_b) = weight();
        let mut of_b = Some(of_b);
        for iteration in 0..6 {
            let (a, of_a) = weight();
            let mut opt = Sgd::default().build(&[a.shallow_clone()], 0.5).unwrap();
            scaler.backward(&of_b.take().map_or(of_a.shallow_clone(), |of_b| of_a + of_b)).unwrap();
            scaler.step(&mut opt).unwrap();
            if iteration == 4 {
                let mut opt = Sgd::default().build(&[b.shallow_clone()], 0.5).unwrap();
                scaler.step(&mut opt).unwrap();
                opt.zero_grad().unwrap();
            }
            drop((a, opt));
            scaler.update().unwrap();
            kept.push(carried(&scaler));
        }
        // The scale grows in every second iteration, and the gradient of the first loss is stepped with in the fifth.
        assert_eq!(kept, [0, 2, 1, 2, 0, 1]);
        assert_eq!(Vec::<f64>::try_from(b).unwrap(), [0.5; 2]);
    }

    fn carried(scaler: &GradScaler) -> usize {
        scaler.iteration.borrow().carried().map_or(0, |carried| carried.made.len())
    }
}
