//! Gradients that no step has used when the scale changes, each with the scale by which it was multiplied.
//!
//! A step that uses one of them later converts it to the present scale first. A gradient is carried only if all of it is
//! from backwards of losses that were scaled by one scale: it was missing or zero when the first of them was scaled, and
//! has changed at most once for each of them since. Whatever else changes it, or replaces it, ends that. It then counts
//! as a gradient of the present scale, as every gradient does that is not listed here.
//!
//! The parameters that a loss reaches are found in its graph. Programs in which every optimizer steps before each update
//! gain nothing by that, so that graphs are searched only for a while: at first, after a step with such a gradient, and
//! after an iteration with another set of optimizers.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use tch::{Kind, Tensor};

use crate::capture;
use crate::error::{Error, GradientError, Result};
use crate::ffi::{self, Gradient, Interrupted, OutsideRegions, Snapshot, Unscaling, Watched};
use crate::gradients::{Change, Gradients, IdentityMap, Plan, change};
use crate::scale::Number;
use crate::scaler::record::{Record, Stage};

/// The gradients, by the identities of their parameters.
#[derive(Debug)]
pub(super) struct Carried {
    gradients: IdentityMap<Known>,
    /// The earlier scales, by the update that kept each.
    scales: BTreeMap<u64, Kept>,
    /// How many iterations have ended.
    updates: u64,
    /// The first iteration whose losses are no longer searched.
    searched_until: u64,
    /// Numbers of the sets of optimizers that an iteration had.
    optimizers: Vec<u64>,
    /// The parameters that the loss reaches which was scaled last.
    latest: Vec<usize>,
}

/// A gradient all of which has one scale.
#[derive(Debug)]
struct Known {
    parameter: Watched,
    /// It alone, as it was when losses began to be counted, which may be that it was missing.
    seen: Snapshot,
    /// The number of losses that were scaled since. The backward of each may have changed it once.
    losses: u32,
    /// Its earlier scale. `None` is the present one.
    scale: Option<u64>,
    /// A flag on its device: zero if it was zero when the first loss of another scale was scaled.
    rest: Option<Tensor>,
    /// The number of iterations that had ended when it was noticed.
    since: u64,
}

/// A scale that was the present one.
#[derive(Debug)]
struct Kept {
    tensor: Tensor,
    /// Its value, if the host has it.
    known: Option<f64>,
}

/// The scale of gradients that were unscaled.
const ONE: u64 = 0;

/// For how many iterations graphs are searched at first, after a step with a gradient from before an update, and after
/// an iteration with another set of optimizers than those before.
const SEARCHED: u64 = 128;

/// How many sets of optimizers are told apart.
const SETS: usize = 32;

impl Default for Carried {
    fn default() -> Self {
        Self {
            gradients: IdentityMap::default(),
            scales: BTreeMap::new(),
            updates: ONE,
            searched_until: SEARCHED,
            optimizers: Vec::new(),
            latest: Vec::new(),
        }
    }
}

impl Known {
    /// How often backwards have changed it since it was seen; `None` if it is not known that nothing else has.
    fn writes(&self, now: &Gradient) -> Option<u32> {
        let seen = &self.seen[0];
        let writes = match seen.exists() {
            true => now.version().wrapping_sub(seen.version()),
            false => now.version().saturating_add(1),
        };
        let is_same = !seen.exists() || seen.identity() == now.identity();
        (is_portable(now) && is_same && writes <= self.losses).then_some(writes)
    }

    /// Whether this many changes are the sums of the backwards of all losses, which had another scale.
    fn is_mixed(&self, writes: u32) -> bool {
        writes > 0 && writes == self.losses && self.rest.is_some()
    }
}

/// Whether another scale can be given to a gradient: fp16 numbers could become infinite, and shared memory is in use
/// elsewhere.
fn is_portable(gradient: &Gradient) -> bool {
    gradient.exists() && !gradient.is_shared() && !gradient.is_fp16()
}

/// Whether nothing is in a gradient. On other devices than the CPU that is known only of a missing one.
fn is_empty(parameter: &Tensor, gradient: &Gradient) -> bool {
    let is_zero = || ffi::any_nonzero(&[&ffi::gradient_rest(parameter, None)?]).map(|any| !any);
    !gradient.exists() || (gradient.is_on_cpu() && is_zero().unwrap_or(false))
}

impl Kept {
    fn new(scale: &Number) -> Result<Self> {
        let _own = OutsideRegions::enter();
        Ok(Self { tensor: scale.tensor().f_detach_copy()?, known: scale.known() })
    }

    /// Whether the host knows that the present scale is another one.
    fn differs(&self, present: &Number) -> bool {
        self.known.zip(present.known()).is_some_and(|(kept, present)| kept != present)
    }

    /// The quotient of it and the present scale; `None` if they are known to be equal.
    fn over(&self, present: &Number) -> Result<Option<Tensor>> {
        let _own = OutsideRegions::enter();
        Ok(match self.known.zip(present.known()) {
            Some((kept, present)) if kept == present => None,
            Some((kept, now)) => {
                Some(ffi::number_new(kept / now, Kind::Float, present.tensor().device())?)
            }
            None => Some(self.tensor.f_div(present.tensor())?),
        })
    }
}

impl Carried {
    /// Notes that the backwards of losses that are being scaled may change gradients.
    pub(super) fn note(&mut self, losses: &[&Tensor], present: &Number) -> Result<()> {
        self.latest.clear();
        if capture::is_inside() {
            // Replays change gradients unseen.
            self.forget();
        } else if self.updates < self.searched_until {
            for loss in losses {
                let leaves = ffi::other_leaves(loss, &[])?;
                for (leaf, now) in leaves.iter().zip(Snapshot::of(&leaves)?.each()) {
                    self.note_leaf(leaf, now, present)?;
                }
            }
        }
        Ok(())
    }

    fn note_leaf(&mut self, leaf: &Tensor, now: Snapshot, present: &Number) -> Result<()> {
        let (gradient, since) = (now[0], self.updates);
        let identity = gradient.parameter();
        self.latest.push(identity);
        if let Some(known) = self.gradients.get_mut(&identity) {
            let writes = known.writes(&gradient);
            if writes.is_some() || (!gradient.exists() && !known.seen[0].exists()) {
                known.losses = known.losses.saturating_add(1);
                let kept = known.scale.filter(|&scale| scale != ONE);
                let kept = kept.and_then(|scale| self.scales.get(&scale));
                if writes == Some(0) && kept.is_some_and(|kept| kept.differs(present)) {
                    known.rest = Some(ffi::gradient_rest(leaf, None)?);
                }
                return Ok(());
            }
            self.gradients.remove(&identity);
        }
        if is_empty(leaf, &gradient) {
            let parameter = Watched::new(leaf);
            let known = Known { parameter, seen: now, losses: 1, scale: None, rest: None, since };
            self.gradients.insert(identity, known);
        }
        Ok(())
    }

    /// Notes that the backward of the loss that was scaled last is complete, and that nothing else has happened since:
    /// it may have changed a gradient more than once.
    pub(super) fn note_backward(&mut self) -> Result<()> {
        let latest = std::mem::take(&mut self.latest);
        if latest.is_empty() {
            return Ok(());
        }
        let Self { gradients, .. } = self;
        let is_first = |identity: &usize| {
            gradients.get(identity).is_some_and(|known| known.losses == 1 && known.scale.is_none())
        };
        let latest: Vec<_> = latest.into_iter().filter(is_first).collect();
        let parameters = latest.iter().map(|identity| gradients[identity].parameter.get());
        let now = Snapshot::of(&parameters.collect::<Result<Vec<_>>>()?)?;
        for (identity, now) in latest.iter().zip(now.each()) {
            let Some(known) = gradients.get_mut(identity) else { continue };
            let seen = &known.seen[0];
            if is_portable(&now[0]) && (!seen.exists() || seen.identity() == now[0].identity()) {
                (known.seen, known.losses) = (now, 0);
            }
        }
        Ok(())
    }

    /// The gradients of an optimizer that have earlier scales, by these, of those that `plan` lists. Fails if a backward
    /// has added one of another scale, as far as the host knows; it asks devices before.
    pub(super) fn earlier(
        &self,
        gradients: &Gradients<'_>,
        plan: &Plan,
    ) -> Result<BTreeMap<u64, Plan>> {
        let (mut earlier, mut mixed) = (BTreeMap::<_, Plan>::new(), Vec::new());
        if self.gradients.is_empty() || capture::is_inside() {
            return Ok(earlier);
        }
        for &index in plan.groups.iter().flat_map(|(_, indices)| indices) {
            let now = &gradients.snapshot()[index];
            let Some(known) = self.gradients.get(&now.parameter()) else { continue };
            match (known.scale, known.writes(now), &known.rest) {
                (Some(scale), Some(0), _) => {
                    earlier.entry(scale).or_default().add(now.device(), index);
                }
                (Some(_), Some(writes), Some(rest)) if known.is_mixed(writes) => {
                    mixed.push((index, rest));
                }
                _ => {}
            }
        }
        let rests: Vec<_> = mixed.iter().map(|(_, rest)| *rest).collect();
        if !rests.is_empty() && ffi::any_nonzero(&rests)? {
            for (index, rest) in mixed {
                if ffi::any_nonzero(&[rest])? {
                    let parameter = gradients.describe(index);
                    return Err(Error::Gradient(GradientError::MixedScales { parameter }));
                }
            }
        }
        Ok(earlier)
    }

    /// Gives gradients that have earlier scales the present one.
    pub(super) fn convert(
        &mut self,
        gradients: &mut Gradients<'_>,
        earlier: BTreeMap<u64, Plan>,
        present: &Number,
    ) -> Result<()> {
        if earlier.is_empty() {
            return Ok(());
        }
        for (scale, plan) in earlier {
            let Some(kept) = self.scales.get(&scale) else { continue };
            let Some(quotient) = kept.over(present)? else { continue };
            // Numbers that are not finite are found by the check that follows.
            let unscaling = Unscaling::new(false, false);
            let done = plan.unscale(gradients.parameters(), &quotient, unscaling);
            if let Err(Interrupted { error, begun: false }) = done {
                return Err(error);
            }
            for &index in plan.groups.iter().flat_map(|(_, indices)| indices) {
                let identity = gradients.snapshot()[index].parameter();
                if let Some(known) = self.gradients.get_mut(&identity) {
                    known.scale = None;
                }
            }
            done.map_err(|interrupted| interrupted.error)?;
        }
        gradients.inspect_again()
    }

    /// Forgets gradients that are about to be unscaled or stepped with.
    pub(super) fn use_up(&mut self, gradients: &[Gradient]) {
        if self.gradients.is_empty() {
            return;
        }
        for gradient in gradients {
            let known = self.gradients.remove(&gradient.parameter());
            if known.is_some_and(|known| known.since < self.updates) {
                self.searched_until = self.updates + SEARCHED;
            }
        }
    }

    /// Ends an iteration with these records, after which the scale may be another one if it `changes`.
    pub(super) fn end(
        &mut self,
        records: &[Record],
        present: &Number,
        changes: bool,
    ) -> Result<()> {
        self.updates += 1;
        let known: Vec<_> = std::mem::take(&mut self.gradients).into_iter().collect();
        let first = |record: &Record| record.snapshot.first().map_or(0, Gradient::parameter);
        let optimizers =
            records.iter().map(|record| (first(record) + record.snapshot.len()) as u64);
        let optimizers = optimizers.fold(0, u64::wrapping_add);
        if self.optimizers.len() < SETS && !self.optimizers.contains(&optimizers) {
            self.optimizers.push(optimizers);
            self.searched_until = self.updates + SEARCHED;
        }
        let is_unscaled = |record: &&Record| record.stage == Stage::Unscaled && !record.dirty;
        let unscaled = records.iter().filter(is_unscaled);
        let unscaled: Vec<_> = unscaled.collect();
        if capture::is_inside() || (known.is_empty() && unscaled.is_empty()) {
            self.forget();
            return Ok(());
        }
        if self.updates < self.searched_until {
            let parameters = known.iter().map(|(_, known)| known.parameter.get());
            let now = Snapshot::of(&parameters.collect::<Result<Vec<_>>>()?)?;
            for ((identity, mut known), now) in known.into_iter().zip(now.each()) {
                match (known.writes(&now[0]), known.scale) {
                    (Some(0), Some(_)) => {}
                    (Some(writes), Some(_)) if known.is_mixed(writes) => {
                        self.gradients.insert(identity, known);
                        continue;
                    }
                    (Some(_), None) if !changes => {}
                    (Some(_), None) => known.scale = Some(self.keep(present)?),
                    _ => continue,
                }
                (known.seen, known.losses, known.rest) = (now, 0, None);
                self.gradients.insert(identity, known);
            }
        }
        for record in unscaled {
            self.searched_until = self.updates + SEARCHED;
            self.end_unscaled(record, present)?;
        }
        let Self { gradients, scales, .. } = self;
        scales.retain(|scale, _| gradients.values().any(|known| known.scale == Some(*scale)));
        Ok(())
    }

    /// Carries the gradients of a record that were unscaled and have not changed since.
    fn end_unscaled(&mut self, record: &Record, present: &Number) -> Result<()> {
        let now = Snapshot::of(&record.parameters)?.each();
        for ((parameter, then), now) in record.parameters.iter().zip(&*record.snapshot).zip(now) {
            if !is_portable(&now[0]) || change(Some(then), &now[0]) != Change::None {
                continue;
            }
            let (parameter, since) = (Watched::new(parameter), self.updates - 1);
            let scale = Some(ONE);
            let identity = now[0].parameter();
            let known = Known { parameter, seen: now, losses: 0, scale, rest: None, since };
            self.gradients.insert(identity, known);
        }
        let tensor = ffi::number_new(1.0, Kind::Float, present.tensor().device())?;
        self.scales.insert(ONE, Kept { tensor, known: Some(1.0) });
        Ok(())
    }

    /// Keeps the present scale, once for each update.
    fn keep(&mut self, present: &Number) -> Result<u64> {
        if let Entry::Vacant(kept) = self.scales.entry(self.updates) {
            kept.insert(Kept::new(present)?);
        }
        Ok(self.updates)
    }

    pub(super) fn forget(&mut self) {
        self.gradients.clear();
        self.scales.clear();
        self.latest.clear();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use tch::Device;

    use super::*;
    use crate::optim::Sgd;
    use crate::scaler::{GradScaler, GradScalerConfig};

    /// A weight with a gradient, and the loss that gave it.
    fn weight() -> (Tensor, Tensor) {
        let w = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let loss = w.sum(None);
        (w, loss)
    }

    fn growing() -> GradScaler {
        let config =
            GradScalerConfig { growth_interval: 1, max_scale: 131072.0, ..Default::default() };
        config.build(Device::Cpu).unwrap()
    }

    /// How many gradients and scales are carried.
    fn carried(scaler: &GradScaler) -> (usize, usize) {
        let mut iteration = scaler.iteration.borrow_mut();
        let (_, _, carried) = iteration.ending();
        (carried.gradients.len(), carried.scales.len())
    }

    #[test]
    fn no_parameter_is_kept_alive() {
        let mut scaler = growing();
        let watched = {
            let ((a, of_a), (b, of_b)) = (weight(), weight());
            let mut opt = Sgd::default().build(&[a.shallow_clone()], 0.5).unwrap();
            scaler.backward(&(of_a + of_b)).unwrap();
            scaler.step(&mut opt).unwrap();
            scaler.update().unwrap();
            assert_eq!(carried(&scaler), (1, 1));
            [a, b].map(|w| Watched::new(&w))
        };
        for watched in watched {
            assert!(!watched.get().unwrap().defined());
        }
    }

    #[test]
    fn a_gradient_that_no_optimizer_uses_is_forgotten_and_graphs_are_no_longer_searched() {
        let ((a, _), (b, _)) = (weight(), weight());
        let mut opt = Sgd::default().build(&[a.shallow_clone()], 0.0).unwrap();
        let mut scaler = growing();
        let mut iteration = |scaler: &mut GradScaler| {
            opt.zero_grad().unwrap();
            scaler.backward(&(&a + &b).sum(None)).unwrap();
            scaler.step(&mut opt).unwrap();
            scaler.update().unwrap();
            carried(scaler)
        };
        assert_eq!(iteration(&mut scaler), (1, 1));
        for _ in 0..SEARCHED {
            iteration(&mut scaler);
        }
        b.shallow_clone().zero_grad();
        assert_eq!(iteration(&mut scaler), (0, 0));
    }

    #[test]
    fn graphs_are_searched_as_long_as_an_optimizer_steps_every_few_iterations() {
        let ((a, _), (b, _)) = (weight(), weight());
        let [mut of_a, mut of_b] =
            [&a, &b].map(|w| Sgd::default().build(&[w.shallow_clone()], 0.0).unwrap());
        let mut scaler = growing();
        for iteration in 0..2 * SEARCHED {
            of_a.zero_grad().unwrap();
            scaler.update_with(if iteration % 40 == 0 { 65536.0 } else { 131072.0 }).unwrap();
            scaler.backward(&(&a + &b).sum(None)).unwrap();
            scaler.step(&mut of_a).unwrap();
            scaler.update().unwrap();
            let expected = if iteration % 40 == 0 { (1, 1) } else { (1, 0) };
            assert_eq!(carried(&scaler), expected, "iteration {iteration}");
            if iteration % 40 == 0 {
                scaler.step(&mut of_b).unwrap();
            }
            of_b.zero_grad().unwrap();
        }
    }
}
