//! A schedule in iterations that a graph captures: the device looks its learning rates up in a table.
//!
//! Only the device knows which steps were taken. It counts them, and reads the rates of the next step from a table of
//! those to come, so that a replay has the rates of a loop that asks for every outcome. The host renews the table from
//! a count that it reads late, without waiting.

use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};

use crate::capture::{self, GraphLink, Member};
use crate::error::{Error, Result};
use crate::ffi::{self, Arrival, OutsideRegions};
use crate::optim::{DrivesRates, ParamGroup, device_numbers};
use crate::panics::lock;
use crate::schedule::Schedule;
use crate::schedule::progress::State;

/// How many steps the table has.
const ROWS: usize = 1024;

/// A schedule that a device follows.
#[derive(Debug)]
pub(super) struct DeviceSchedule {
    link: GraphLink,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    schedule: Schedule,
    /// The state of which the table begins.
    state: State,
    /// The optimizer's groups, which give the options beside the learning rates.
    groups: Vec<ParamGroup>,
    /// The rates that the optimizer's steps read, as its shape has them.
    block: Tensor,
    /// The rates of each step to come.
    table: Tensor,
    /// The steps that were taken since the table begins: one f32.
    taken: Tensor,
    /// The iterations since then, at least as many as were taken.
    iterations: u64,
    /// The iterations that are known to have taken no step.
    skipped: u64,
    /// The count that is on its way, and the iterations when it was sent.
    arrival: Option<(Arrival, u64)>,
    /// The steps for which the table has rates, and why there are no more.
    rows: usize,
    end: Option<String>,
}

impl DeviceSchedule {
    /// Makes a table that begins with the rates of `state`.
    pub(super) fn new(
        schedule: Schedule,
        state: State,
        groups: Vec<ParamGroup>,
        block: Tensor,
        skipped: u64,
    ) -> Result<Arc<Self>> {
        let _own = OutsideRegions::enter();
        let mut sizes = block.size();
        sizes.insert(0, ROWS as i64);
        let options = (Kind::Float, block.device());
        let mut inner = Inner {
            table: Tensor::f_zeros(&sizes, options)?,
            taken: Tensor::f_zeros([1], options)?,
            schedule,
            state,
            groups,
            block,
            iterations: 0,
            skipped,
            arrival: None,
            rows: 0,
            end: None,
        };
        inner.fill()?;
        if inner.rows < 2 {
            return Err(inner.ended());
        }
        Ok(Arc::new(Self { link: GraphLink::default(), inner: Mutex::new(inner) }))
    }

    /// The schedule as its optimizer knows it.
    pub(super) fn driver(self: &Arc<Self>) -> Arc<dyn DrivesRates> {
        Arc::<Self>::clone(self)
    }

    /// Notes a change that replays do not follow.
    pub(super) fn note_change(&self, what: &'static str) {
        self.link.note_change(what);
    }

    /// Counts a step unless `found_inf` is set, and gives the optimizer the rates of the next one. Does not
    /// synchronize.
    pub(super) fn follow(self: &Arc<Self>, found_inf: Option<&Tensor>) -> Result<()> {
        let _own = OutsideRegions::enter();
        let _no_grad = tch::no_grad_guard();
        if capture::has_joined(self) {
            let remedy = "step a schedule once in an iteration";
            return Err(capture::refusal("a second step of one schedule", remedy));
        }
        let mut inner = lock(&self.inner);
        if !capture::is_capturing() {
            inner.go_on()?;
        }
        let one = inner.taken.f_ones_like()?;
        let taken = match found_inf {
            Some(flag) => one.f_sub(&flag.f_view(1)?)?,
            None => one,
        };
        let _same = inner.taken.f_add_(&taken)?;
        let row = inner.table.f_index_select(0, &inner.taken.f_to_kind(Kind::Int64)?)?;
        let row = row.f_view_as(&inner.block)?;
        inner.block.f_copy_(&row)?;
        capture::keep([&inner.block, &inner.table, &inner.taken]);
        capture::register(self);
        Ok(())
    }

    /// Reads how many steps were taken. Returns the state, and how many iterations have skipped theirs. Synchronizes.
    pub(super) fn settle(&self) -> Result<(State, u64)> {
        let mut inner = lock(&self.inner);
        inner.settle()?;
        Ok((inner.state.clone(), inner.skipped))
    }
}

impl Inner {
    /// Writes the rates of the steps from `state` on.
    fn fill(&mut self) -> Result<()> {
        let mut state = self.state.clone();
        let mut numbers = Vec::with_capacity(ROWS * self.block.numel());
        (self.rows, self.end) = (0, None);
        for row in 0..ROWS {
            if row > 0 {
                let momenta = state.rates.momenta.clone();
                let advanced = self.schedule.advance(&mut state.progress, &mut state.rates);
                if let Err(error) = advanced {
                    self.end = Some(error.to_string());
                    break;
                }
                if state.rates.momenta != momenta {
                    self.end =
                        Some("it changes the momentum, too, which a graph cannot".to_owned());
                    break;
                }
            }
            let at = self.groups.iter().zip(&state.rates.lrs);
            let groups = at.map(|(group, &lr)| ParamGroup { lr, ..*group });
            numbers.extend(device_numbers(groups));
            self.rows += 1;
        }
        numbers.resize(ROWS * self.block.numel(), 0.0);
        ffi::graph_write(&self.table, &numbers)
    }

    /// Prepares the next iteration: renews the table in time, by a count that has arrived. Synchronizes only if the
    /// device is as many iterations late as the table has rows.
    fn go_on(&mut self) -> Result<()> {
        if let Some((arrival, at)) = &self.arrival
            && let Some(taken) = arrival.poll()?
        {
            let at = *at;
            self.begin_after(taken as u64, at)?;
        }
        if self.iterations + 2 > self.rows as u64 {
            self.settle()?;
            if self.rows < 2 {
                return Err(self.ended());
            }
        } else if self.arrival.is_none() && self.iterations >= self.rows as u64 / 2 {
            self.arrival = Some((Arrival::new(&self.taken)?, self.iterations));
        }
        self.iterations += 1;
        Ok(())
    }

    fn ended(&self) -> Error {
        let remedy = self.end.clone().unwrap_or_default();
        Error::Capture { call: "a step of this schedule", remedy }
    }

    /// Begins the table after as many more steps, which were taken in so many iterations.
    fn begin_after(&mut self, taken: u64, iterations: u64) -> Result<()> {
        let (_own, _no_grad) = (OutsideRegions::enter(), tch::no_grad_guard());
        let mut state = self.state.clone();
        for _ in 0..taken {
            self.schedule.advance(&mut state.progress, &mut state.rates)?;
        }
        let before = std::mem::replace(&mut self.state, state);
        if let Err(error) = self.fill() {
            self.state = before;
            return Err(error);
        }
        let known = ffi::number_new(taken as f64, Kind::Float, self.taken.device())?;
        let _same = self.taken.f_sub_(&known)?;
        self.skipped = self.skipped.saturating_add(iterations.saturating_sub(taken));
        self.iterations = self.iterations.saturating_sub(iterations);
        self.arrival = None;
        Ok(())
    }

    /// The same by the present count. Synchronizes.
    fn settle(&mut self) -> Result<()> {
        let _own = OutsideRegions::enter();
        let taken = self.taken.f_double_value(&[0])? as u64;
        self.begin_after(taken, self.iterations)
    }
}

impl Member for DeviceSchedule {
    fn link(&self) -> &GraphLink {
        &self.link
    }

    fn before_replay(&self) -> Result<()> {
        lock(&self.inner).go_on()
    }
}

impl DrivesRates for DeviceSchedule {
    fn lrs(&self) -> Result<Vec<f64>> {
        Ok(self.settle()?.0.rates.lrs)
    }
}
