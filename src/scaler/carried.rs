//! Gradients that no step has used when the scale changes, each with the scale by which it was multiplied.
//!
//! A step that uses one of them later converts it to the present scale first. A gradient is carried only if all of it
//! is from backwards of losses that were scaled by one scale: it was missing or zero when the first of them was scaled,
//! and has changed at most once for each of them since. Whatever else changes it, or replaces it, ends that. It then
//! counts as a gradient of the present scale, as every gradient does that is not listed here.
//!
//! The parameters that a loss reaches are found in its graph. Programs in which every optimizer steps before each
//! update gain nothing by that, so that graphs are searched only for a while: at first, after a step with such a
//! gradient, after an optimizer was left unscaled, and after an iteration with another set of optimizers.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use tch::{Device, Kind, Tensor};

use crate::capture;
use crate::error::{Error, GradientError, Result};
use crate::ffi::{self, Gradient, Interrupted, OutsideRegions, Snapshot, Unscaling, Watched};
use crate::gradients::{Change, Gradients, IdentityMap, Plan, change};
use crate::scale::ScaleTensor;
use crate::scaler::record::{Record, Stage};

/// The gradients, by the identities of their parameters.
#[derive(Debug)]
pub(super) struct Carried {
    gradients: IdentityMap<Known>,
    /// The earlier scales, by the update that kept each.
    scales: BTreeMap<u64, EarlierScale>,
    /// How many iterations have ended.
    updates: u64,
    /// The first iteration whose losses are no longer searched.
    searched_until: u64,
    /// Numbers of the sets of optimizers that an iteration had.
    optimizers: Vec<u64>,
    /// The number of losses that were scaled in this iteration.
    noted: u32,
    /// The parameters that the loss reaches which was scaled last.
    latest: Vec<usize>,
}

/// What is known of the gradients of an optimizer while they are taken away, by the identities of their parameters.
#[derive(Debug)]
pub(crate) struct Aside(IdentityMap<Apart>);

/// A gradient that is taken away.
#[derive(Debug)]
struct Apart {
    known: Option<Known>,
    before: Gradient,
    /// Whether all of it has the present scale, or nothing is in it.
    of_present: bool,
}

/// The gradients of an optimizer that have earlier scales, by these.
pub(super) type Earlier = BTreeMap<u64, Plan>;

/// A gradient all of which has one scale, or that is known to be a sum with another one.
#[derive(Debug)]
struct Known {
    parameter: Watched,
    /// It alone, as it was when losses began to be counted, which may be that it was missing.
    seen: Snapshot,
    /// The number of losses that were scaled since. The backward of each may have changed it once.
    losses: u32,
    /// Its earlier scale. `None` is the present one.
    scale: Option<u64>,
    /// The count that tells whether it becomes a sum with a gradient of another scale, since a loss of one was scaled.
    addition: Option<Addition>,
    /// Whether it was such a sum already when it was seen.
    is_sum: bool,
    /// The number of iterations that had ended when it was noticed.
    since: u64,
}

/// The backwards that may add to a gradient.
#[derive(Debug)]
struct Addition {
    /// A flag on its device: zero if the gradient was zero before.
    rest: Tensor,
    /// How many have done so, on the CPU.
    count: Tensor,
}

/// A scale that was the present one.
#[derive(Debug)]
struct EarlierScale {
    tensor: Tensor,
    /// Its value, if the host has it.
    known: Option<f64>,
}

/// The changes at the end of an iteration.
#[derive(Debug, Default)]
pub(super) struct Ending {
    /// The gradients that stay known, as they are now.
    now: Vec<(usize, Snapshot)>,
    /// The scale of those that have the present one, if it changes.
    present: Option<EarlierScale>,
    /// The gradients that have been unscaled, by their parameters, and the scale of 1 that they have.
    unscaled: Vec<(Watched, Snapshot)>,
    one: Option<EarlierScale>,
    /// A number of the set of optimizers.
    optimizers: u64,
}

/// The scale of gradients that were unscaled.
const ONE: u64 = 0;

/// For how many iterations graphs are searched at first, after a step with a gradient from before an update, after an
/// optimizer was left unscaled, and after an iteration with another set of optimizers than those before.
const SEARCHED: u64 = 128;

/// For how many losses of one iteration graphs are searched, which a program may never end.
const LOSSES: u32 = 1024;

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
            noted: 0,
            latest: Vec::new(),
        }
    }
}

impl Known {
    fn new(parameter: Watched, seen: Snapshot, scale: Option<u64>, since: u64) -> Self {
        Self { parameter, seen, losses: 0, scale, addition: None, is_sum: false, since }
    }

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

    /// Returns whether this many changes, all of them by backwards, have made it a sum with a gradient of another
    /// scale.
    fn is_sum(&self, writes: u32) -> bool {
        match &self.addition {
            _ if writes == 0 => self.is_sum,
            Some(addition) => addition.number() == Some(writes),
            None => false,
        }
    }

    /// Counts losses from now on, if the changes since it was seen are known to be those of backwards.
    fn see(&mut self, now: Snapshot, is_sum: bool) {
        (self.seen, self.losses, self.is_sum) = (now, 0, is_sum);
        if !is_sum {
            self.addition = None;
        }
    }

    /// Counts the backwards of a loss of another scale, which may add to it.
    fn count(&mut self, leaf: &Tensor) {
        let addition = match self.addition.take() {
            Some(Addition { rest, .. }) if self.is_sum => Addition::new(leaf, Ok(rest)),
            _ => Addition::new(leaf, ffi::gradient_rest(leaf, None)),
        };
        self.addition = addition.ok();
    }
}

impl Addition {
    fn new(leaf: &Tensor, rest: Result<Tensor>) -> Result<Self> {
        Ok(Self { rest: rest?, count: ffi::count_additions(leaf)? })
    }

    fn number(&self) -> Option<u32> {
        let _own = OutsideRegions::enter();
        u32::try_from(self.count.f_int64_value(&[]).ok()?).ok()
    }
}

/// Returns whether another scale can be given to a gradient: fp16 numbers could become infinite, shared memory is in
/// use elsewhere, and nothing is read of other layouts.
fn is_portable(gradient: &Gradient) -> bool {
    let is_readable = gradient.is_strided() || gradient.is_sparse();
    gradient.exists() && is_readable && !gradient.is_shared() && !gradient.is_fp16()
}

/// Returns whether nothing is in a gradient. On other devices than the CPU that is known only of a missing one.
fn is_empty(parameter: &Tensor, gradient: &Gradient) -> bool {
    let is_zero = || ffi::any_nonzero(&[&ffi::gradient_rest(parameter, None)?]).map(|any| !any);
    !gradient.exists() || (gradient.is_on_cpu() && is_zero().unwrap_or(false))
}

impl EarlierScale {
    fn new(scale: &ScaleTensor) -> Result<Self> {
        let _own = OutsideRegions::enter();
        Ok(Self { tensor: scale.tensor().f_detach_copy()?, known: scale.known() })
    }

    /// That of gradients that were unscaled.
    fn one(device: Device) -> Result<Self> {
        let tensor = ffi::number_new(1.0, Kind::Float, device)?;
        Ok(Self { tensor, known: Some(1.0) })
    }

    /// Returns whether the present scale is another one; `None` if the host does not know.
    fn differs(&self, present: &ScaleTensor) -> Option<bool> {
        self.known.zip(present.known()).map(|(kept, present)| kept != present)
    }

    /// The quotient of it and the present scale; `None` if they are known to be equal.
    fn over(&self, present: &ScaleTensor) -> Result<Option<Tensor>> {
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
    pub(super) fn note(&mut self, losses: &[&Tensor], present: &ScaleTensor) -> Result<()> {
        self.latest.clear();
        // Replays change gradients unseen.
        if capture::is_inside() || self.noted >= LOSSES {
            self.forget();
        } else if self.updates < self.searched_until {
            for loss in losses {
                self.noted = self.noted.saturating_add(1);
                let leaves = ffi::other_leaves(loss, &[])?;
                for (leaf, now) in leaves.iter().zip(Snapshot::of(&leaves)?.each()) {
                    self.note_leaf(leaf, now, present);
                }
            }
        }
        Ok(())
    }

    fn note_leaf(&mut self, leaf: &Tensor, now: Snapshot, present: &ScaleTensor) {
        let gradient = now[0];
        let identity = gradient.parameter();
        self.latest.push(identity);
        if let Some(known) = self.gradients.get_mut(&identity) {
            let writes = known.writes(&gradient);
            if writes.is_some() || (!gradient.exists() && !known.seen[0].exists()) {
                let kept = known.scale.and_then(|scale| self.scales.get(&scale));
                let differs = kept.filter(|_| writes == Some(0)).and_then(|it| it.differs(present));
                let becomes_sum = writes.is_some_and(|writes| known.is_sum(writes));
                let is_sum = becomes_sum || known.is_sum;
                if (is_sum || differs == Some(true)) && is_empty(leaf, &gradient) {
                    *known = Known::new(Watched::new(leaf), now, None, self.updates);
                } else if becomes_sum {
                    known.see(now, true);
                }
                known.losses = known.losses.saturating_add(1);
                if known.scale.is_some() && (known.is_sum || differs == Some(true)) {
                    known.count(leaf);
                } else if differs == Some(false) && !known.is_sum {
                    known.scale = None;
                }
                return;
            }
            self.gradients.remove(&identity);
        }
        if is_empty(leaf, &gradient) {
            let mut known = Known::new(Watched::new(leaf), now, None, self.updates);
            known.losses = 1;
            self.gradients.insert(identity, known);
        }
    }

    /// Notes that the backward of the loss that was scaled last is complete, and that nothing else has happened since:
    /// it may have changed a gradient more than once. Without memory, that stays unknown.
    pub(super) fn note_backward(&mut self) {
        let latest = std::mem::take(&mut self.latest);
        let Self { gradients, .. } = self;
        let latest: Vec<_> = latest
            .into_iter()
            .filter(|identity| {
                let known = gradients.get(identity);
                known.is_some_and(|known| known.losses == 1 && known.scale.is_none())
            })
            .collect();
        if latest.is_empty() {
            return;
        }
        let parameters = latest.iter().map(|identity| gradients[identity].parameter.get());
        let parameters = parameters.collect::<Result<Vec<_>>>();
        let Ok(now) = parameters.and_then(|parameters| Snapshot::of(&parameters)) else { return };
        for (identity, now) in latest.iter().zip(now.each()) {
            let Some(known) = gradients.get_mut(identity) else { continue };
            let seen = &known.seen[0];
            if is_portable(&now[0]) && (!seen.exists() || seen.identity() == now[0].identity()) {
                known.see(now, false);
            }
        }
    }

    /// The gradients of an optimizer that have earlier scales, by these, of those that `plan` lists. Fails if a
    /// backward has added one of another scale, as far as the host knows, and all gradients are finite: it asks devices
    /// before.
    pub(super) fn earlier(
        &self,
        gradients: &Gradients<'_>,
        plan: &Plan,
        present: &ScaleTensor,
    ) -> Result<Earlier> {
        let (mut earlier, mut sums) = (Earlier::new(), Vec::new());
        if self.gradients.is_empty() || capture::is_inside() {
            return Ok(earlier);
        }
        for &index in plan.groups.iter().flat_map(|(_, indices)| indices) {
            let now = &gradients.snapshot()[index];
            let Some(known) = self.gradients.get(&now.parameter()) else { continue };
            match (known.scale, known.writes(now), &known.addition) {
                (Some(_), Some(writes), Some(addition)) if known.is_sum(writes) => {
                    sums.push((index, &addition.rest));
                }
                (Some(scale), Some(0), _) => {
                    earlier.entry(scale).or_default().add(now.device(), index);
                }
                _ => {}
            }
        }
        if !sums.is_empty() {
            refuse_sums(gradients, &sums, plan, present)?;
        }
        Ok(earlier)
    }

    /// Gives gradients of these parameters that have earlier scales the present one. After a failure, those that were
    /// changed have it.
    pub(super) fn convert(
        &mut self,
        parameters: &[Tensor],
        earlier: Earlier,
        present: &ScaleTensor,
    ) -> std::result::Result<(), Interrupted> {
        let whole = |error| Interrupted { error, begun: false };
        for (scale, plan) in earlier {
            let Some(kept) = self.scales.get(&scale) else { continue };
            let Some(quotient) = kept.over(present).map_err(whole)? else { continue };
            // Numbers that are not finite are found by the check that follows.
            plan.unscale(parameters, &quotient, Unscaling::new(false, false))?;
            let converted = plan.groups.iter().flat_map(|(_, indices)| indices);
            let converted: Vec<_> = converted.map(|&i| parameters[i].shallow_clone()).collect();
            for now in Snapshot::of(&converted).map_err(whole)?.each() {
                if let Some(known) = self.gradients.get_mut(&now[0].parameter()) {
                    known.scale = None;
                    known.see(now, false);
                }
            }
        }
        Ok(())
    }

    /// Forgets gradients that have been unscaled or that a step uses.
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

    /// Returns the changes at the end of an iteration with these records, after which the scale may be another one if
    /// it `changes`. Nothing has changed yet.
    pub(super) fn ending(
        &self,
        records: &[Record],
        present: &ScaleTensor,
        changes: bool,
    ) -> Result<Ending> {
        let first = |record: &Record| record.snapshot.first().map_or(0, Gradient::parameter);
        let optimizers =
            records.iter().map(|record| (first(record) + record.snapshot.len()) as u64);
        let optimizers = optimizers.fold(0, u64::wrapping_add);
        let mut ending = Ending { optimizers, ..Ending::default() };
        if capture::is_inside() {
            return Ok(ending);
        }
        if !self.gradients.is_empty() && self.is_searched_after(optimizers) {
            let parameters = self.gradients.values().map(|known| known.parameter.get());
            let now = Snapshot::of(&parameters.collect::<Result<Vec<_>>>()?)?;
            ending.now = self.gradients.keys().copied().zip(now.each()).collect();
            ending.present = changes.then(|| EarlierScale::new(present)).transpose()?;
        }
        for record in records.iter().filter(|record| record.stage == Stage::Unscaled) {
            ending.unscaled.extend(self.unscaled(record)?);
        }
        if !ending.unscaled.is_empty() {
            ending.one = Some(EarlierScale::one(present.tensor().device())?);
        }
        Ok(ending)
    }

    /// The gradients of a record that are unscaled, which the program may have changed since, as by clipping.
    fn unscaled(&self, record: &Record) -> Result<Vec<(Watched, Snapshot)>> {
        let now = Snapshot::of(&record.parameters)?.each();
        let both = record.parameters.iter().zip(&*record.snapshot).zip(now);
        let is_unscaled = |then: &Gradient, now: &Gradient| match change(Some(then), now) {
            Change::None => true,
            Change::Numbers => !(record.rescaled && self.may_be_sum(now.parameter())),
            Change::Replaced(_) => false,
        };
        let left =
            both.filter(|((_, then), now)| is_portable(&now[0]) && is_unscaled(then, &now[0]));
        Ok(left.map(|((parameter, _), now)| (Watched::new(parameter), now)).collect())
    }

    /// Returns whether the backward of a loss that was scaled since may have added to an unscaled gradient.
    pub(super) fn may_be_sum(&self, parameter: usize) -> bool {
        let known = self.gradients.get(&parameter).filter(|known| known.scale == Some(ONE));
        let has_added = |addition: &Addition| addition.number() != Some(0);
        known.is_none_or(|known| known.losses > 0 && known.addition.as_ref().is_none_or(has_added))
    }

    /// Goes on to search graphs: a program has left gradients to a later step.
    pub(super) fn search_on(&mut self) {
        self.searched_until = self.searched_until.max(self.updates + SEARCHED);
    }

    /// Returns whether nothing is known of any gradient.
    pub(super) fn is_empty(&self) -> bool {
        self.gradients.is_empty()
    }

    /// Notes that this crate has replaced gradients by others with the same numbers.
    pub(super) fn follow(&mut self, before: &[Gradient], parameters: &[Tensor]) -> Result<()> {
        for (before, now) in before.iter().zip(Snapshot::of(parameters)?.each()) {
            let Some(known) = self.gradients.get_mut(&before.parameter()) else { continue };
            if before.identity() == now[0].identity() {
                continue;
            }
            let Some(writes) = known.writes(before) else { continue };
            let is_sum = known.scale.is_some() && known.is_sum(writes);
            if known.scale.is_none() || writes == 0 || is_sum {
                known.see(now, is_sum);
            }
        }
        Ok(())
    }

    /// Takes what is known of gradients that are about to be taken away, none of which has an earlier scale.
    pub(super) fn set_aside(&mut self, gradients: &Gradients<'_>) -> Aside {
        let is_searched = self.updates < self.searched_until;
        let mut aside = IdentityMap::default();
        for (parameter, now) in gradients.parameters().iter().zip(gradients.snapshot().iter()) {
            // A parameter may be listed twice.
            aside.entry(now.parameter()).or_insert_with(|| {
                let known = self.gradients.remove(&now.parameter());
                let of_present =
                    |known: &Known| known.scale.is_none() && known.writes(now).is_some();
                let of_present = known.as_ref().is_some_and(of_present)
                    || (is_searched && is_empty(parameter, now));
                Apart { known, before: *now, of_present: of_present && !capture::is_inside() }
            });
        }
        Aside(aside)
    }

    /// Goes on after a failure: the gradients that were taken away are there again.
    pub(super) fn put_back(&mut self, aside: Aside) {
        for (identity, Apart { known, .. }) in aside.0 {
            self.gradients.remove(&identity);
            if !capture::is_inside() {
                self.gradients.extend(known.map(|known| (identity, known)));
            }
        }
    }

    /// Goes on with sums of the gradients that were taken away and others of the present scale.
    pub(super) fn join(&mut self, mut aside: Aside, parameters: &[Tensor]) -> Result<()> {
        for (parameter, now) in parameters.iter().zip(Snapshot::of(parameters)?.each()) {
            let identity = now[0].parameter();
            let Some(Apart { known, before, of_present }) = aside.0.remove(&identity) else {
                continue;
            };
            self.gradients.remove(&identity);
            let is_untouched = now[0].exists() && change(Some(&before), &now[0]) == Change::None;
            if is_untouched {
                self.gradients.extend(known.map(|known| (identity, known)));
            } else if of_present && is_portable(&now[0]) {
                let (since, losses) =
                    known.map_or((self.updates, 0), |known| (known.since, known.losses));
                let sum = Known::new(Watched::new(parameter), now, None, since);
                self.gradients.insert(identity, Known { losses, ..sum });
            }
        }
        Ok(())
    }

    /// The parameters of those among these gradients that are unscaled, although no record has them any more.
    #[cfg(feature = "insight")]
    pub(super) fn left_unscaled(&self, gradients: &[Gradient]) -> impl Iterator<Item = usize> {
        let is_unscaled = |now: &&Gradient| {
            self.gradients.get(&now.parameter()).is_some_and(|known| {
                known.scale == Some(ONE) && !known.is_sum && known.writes(now) == Some(0)
            })
        };
        gradients.iter().filter(is_unscaled).map(|gradient| gradient.parameter())
    }

    /// Notes the unscaled gradients of a record before the backward of another loss.
    pub(super) fn note_unscaled(&mut self, record: &Record, present: &ScaleTensor) -> Result<()> {
        if capture::is_inside() {
            return Ok(());
        }
        let unscaled = self.unscaled(record)?;
        if unscaled.is_empty() {
            return Ok(());
        }
        if let Entry::Vacant(one) = self.scales.entry(ONE) {
            one.insert(EarlierScale::one(present.tensor().device())?);
        }
        // In this iteration; a step that gains by it extends that.
        self.searched_until = self.searched_until.max(self.updates + 1);
        for (parameter, now) in unscaled {
            let identity = now[0].parameter();
            // It may have been zeroed and count as one of the present scale since.
            let is_known = self.gradients.get(&identity).is_some_and(|known| {
                known.scale.is_none_or(|scale| scale == ONE) && known.writes(&now[0]) == Some(0)
            });
            if !is_known {
                let known = Known::new(parameter, now, Some(ONE), self.updates);
                self.gradients.insert(identity, known);
            }
        }
        Ok(())
    }

    /// Returns whether graphs are searched in the iteration after one with this set of optimizers.
    fn is_searched_after(&self, optimizers: u64) -> bool {
        let is_new = self.optimizers.len() < SETS && !self.optimizers.contains(&optimizers);
        is_new || self.updates + 1 < self.searched_until
    }

    /// Ends an iteration.
    pub(super) fn end(&mut self, ending: Ending) {
        let Ending { now, present, unscaled, one, optimizers } = ending;
        self.updates += 1;
        self.noted = 0;
        self.latest.clear();
        if self.optimizers.len() < SETS && !self.optimizers.contains(&optimizers) {
            self.optimizers.push(optimizers);
            self.searched_until = self.updates + SEARCHED;
        }
        let mut known = std::mem::take(&mut self.gradients);
        for (identity, now) in now {
            let Some(mut known) = known.remove(&identity) else { continue };
            let Some(writes) = known.writes(&now[0]) else { continue };
            let is_sum = known.scale.is_some() && known.is_sum(writes);
            if known.scale.is_some() && writes > 0 && !is_sum {
                continue;
            }
            if known.scale.is_none() && present.is_some() {
                known.scale = Some(self.updates);
            }
            known.see(now, is_sum);
            self.gradients.insert(identity, known);
        }
        if !unscaled.is_empty() {
            self.searched_until = self.updates + SEARCHED;
        }
        for (parameter, now) in unscaled {
            let (identity, since) = (now[0].parameter(), self.updates - 1);
            let scale = Some(ONE);
            self.gradients.insert(identity, Known::new(parameter, now, scale, since));
        }
        self.scales.extend(present.map(|present| (self.updates, present)));
        self.scales.extend(one.map(|one| (ONE, one)));
        let Self { gradients, scales, .. } = self;
        scales.retain(|scale, _| gradients.values().any(|known| known.scale == Some(*scale)));
    }

    fn forget(&mut self) {
        self.gradients.clear();
        self.scales.clear();
    }
}

/// Fails if one of these gradients is a sum with something that was left of one of another scale, by its flag, unless a
/// gradient that `plan` lists is not finite: that step is skipped.
fn refuse_sums(
    gradients: &Gradients<'_>,
    sums: &[(usize, &Tensor)],
    plan: &Plan,
    present: &ScaleTensor,
) -> Result<()> {
    let parameters = gradients.parameters();
    for (index, rest) in sums {
        let now = ffi::gradient_rest(&parameters[*index], Some(rest))?;
        if !ffi::any_nonzero(&[&now])? {
            continue;
        }
        let found = plan.check(parameters, present.tensor(), false)?.found;
        let flags: Vec<_> = found.iter().map(|flag| &flag.tensor).collect();
        if ffi::any_nonzero(&flags)? {
            return Ok(());
        }
        let parameter = gradients.describe(*index);
        return Err(Error::Gradient(GradientError::MixedScales { parameter }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

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
        let carried = iteration.carried();
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
    fn a_program_that_ends_no_iteration_is_not_followed_for_ever() {
        let mut scaler = growing();
        for loss in 0..2 * LOSSES {
            let (_, loss_of_another_leaf) = weight();
            scaler.backward(&loss_of_another_leaf).unwrap();
            assert!(carried(&scaler).0 <= LOSSES as usize, "loss {loss}");
        }
        assert_eq!(carried(&scaler), (0, 0));
        // The next iteration is like any other.
        let ((a, of_a), (_b, of_b)) = (weight(), weight());
        let mut opt = Sgd::default().build(&[a], 0.5).unwrap();
        scaler.backward(&(of_a + of_b)).unwrap();
        scaler.step(&mut opt).unwrap();
        scaler.update().unwrap();
        scaler.backward(&weight().1).unwrap();
        assert_eq!(carried(&scaler), (1, 0));
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
