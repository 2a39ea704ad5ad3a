//! The parameter groups of an optimizer.

use crate::capture;
use crate::error::{Error, OptimizerError, Result};
use crate::optim::optimizer::GroupRule;
use crate::optim::{Algorithm, Optimizer, ParamGroup};

/// Changes of groups, which an iteration of a graph cannot make.
const SET: &str = "a change of the optimizer's options";
const OUTSIDE: &str = "make it before `replay`: replays read the learning rates of their time";

impl Optimizer {
    /// Returns the options of a group. Corresponds to `optimizer.param_groups[group]` in PyTorch.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`].
    pub fn param_group(&self, group: usize) -> Result<&ParamGroup> {
        let groups = self.groups.len();
        self.groups
            .get(group)
            .ok_or(Error::Optimizer(OptimizerError::NoSuchGroup { group, groups }))
    }

    /// Returns the number of groups, at least 1.
    pub fn param_group_count(&self) -> usize {
        self.groups.len()
    }

    /// Replaces the options of a group. A parameter that moves between Muon and its AdamW thereby starts with a new
    /// state.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`]; [`Error::InvalidArgument`] for a value outside its range, or for `amsgrad` with
    /// low-bit moments; [`OptimizerError::OtherAlgorithm`]. The old options are kept then.
    pub fn set_param_group(&mut self, group: usize, options: ParamGroup) -> Result<()> {
        self.change(Some(group), |old| {
            *old = options;
            Ok(())
        })
    }

    /// Moves the parameters whose names match one of the patterns to a group, including those that are added later, and
    /// returns how many match now. If `group` is the number of groups, a new one is made with the options of group 0. A
    /// `*` matches any characters. If several calls match a parameter, the last one counts. A parameter with several
    /// names, such as a tied weight, matches by any of them. Parameters from a list without names are called `"0"`,
    /// `"1"` and so on.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`] if `group` is more than the number of groups; [`OptimizerError::Parameter`] for
    /// a variable that was added to the `VarStore` and cannot be taken up.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn};
    /// use tch_amp::optim::AdamW;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let _net = nn::linear(vs.root() / "linear", 4, 2, Default::default());
    /// let mut opt = AdamW::default().build(&vs, 1e-3)?;
    /// assert_eq!(opt.assign_group(1, &["*.bias", "*norm*"])?, 1);
    /// opt.set_weight_decay_group(1, 0.0)?;
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn assign_group(&mut self, group: usize, patterns: &[&str]) -> Result<usize> {
        self.take_added()?;
        self.take_names()?;
        let groups = self.groups.len();
        if group > groups {
            return Err(Error::Optimizer(OptimizerError::NoSuchGroup { group, groups }));
        }
        self.take_rates_back()?;
        self.make_groups(group);
        let patterns = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        let rule = GroupRule { patterns, group };
        let moved = self.moving(|optimizer| {
            let slots = optimizer.slots.iter_mut().filter(|slot| rule.matches(slot));
            slots.map(|slot| slot.group = group).count()
        });
        self.rules.push(rule);
        self.note_change("the groups of the optimizer");
        Ok(moved)
    }

    /// Makes the groups up to `group`.
    pub(crate) fn make_groups(&mut self, group: usize) {
        let first = self.groups[0];
        self.groups.resize(self.groups.len().max(group + 1), first);
    }

    /// Returns the learning rate of a group.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`].
    pub fn lr(&self, group: usize) -> Result<f64> {
        Ok(self.param_group(group)?.lr)
    }

    /// Sets the learning rate of all groups. Synchronizes if a schedule in an iteration of a graph has set it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is finite and at least 0; the old value is kept then.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.change(None, |options| set(&mut options.lr, lr))
    }

    /// Sets the learning rate of a group.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`]; otherwise the same as [`set_lr`](Self::set_lr).
    pub fn set_lr_group(&mut self, group: usize, lr: f64) -> Result<()> {
        self.change(Some(group), |options| set(&mut options.lr, lr))
    }

    /// Sets the momentum of all groups: for Adam, AdamW and Lion the first beta, as in tch; for Muon its own, not that
    /// of its AdamW.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchOption`] for Adagrad; [`Error::InvalidArgument`] for a value outside its range. The old
    /// value is kept then.
    pub fn set_momentum(&mut self, momentum: f64) -> Result<()> {
        self.change(None, |options| set_momentum(options, momentum))
    }

    /// Sets the momentum of a group, like [`set_momentum`](Self::set_momentum).
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`]; otherwise the same as [`set_momentum`](Self::set_momentum).
    pub fn set_momentum_group(&mut self, group: usize, momentum: f64) -> Result<()> {
        self.change(Some(group), |options| set_momentum(options, momentum))
    }

    /// Sets the weight decay of all groups, for Muon also that of its AdamW.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is finite and at least 0; the old value is kept then.
    pub fn set_weight_decay(&mut self, weight_decay: f64) -> Result<()> {
        self.change(None, |options| {
            options.algorithm.set_weight_decay(weight_decay);
            Ok(())
        })
    }

    /// Sets the weight decay of a group, for Muon also that of its AdamW.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`]; otherwise the same as [`set_weight_decay`](Self::set_weight_decay).
    pub fn set_weight_decay_group(&mut self, group: usize, weight_decay: f64) -> Result<()> {
        self.change(Some(group), |options| {
            options.algorithm.set_weight_decay(weight_decay);
            Ok(())
        })
    }

    /// Sets the learning rate of each group, and its momentum where there is one; none if a value is refused.
    pub(crate) fn set_rates(&mut self, lrs: &[f64], momenta: &[Option<f64>]) -> Result<()> {
        self.take_rates_back()?;
        let mut groups = self.groups.clone();
        for ((options, &lr), &momentum) in groups.iter_mut().zip(lrs).zip(momenta) {
            options.lr = lr;
            if let Some(momentum) = momentum {
                set_momentum(options, momentum)?;
            }
            options.algorithm.check(lr)?;
            self.states.check(&options.algorithm)?;
        }
        let before = std::mem::replace(&mut self.groups, groups);
        self.note_groups(&before);
        Ok(())
    }

    /// Changes one group or all of them; none if a value is refused.
    fn change(
        &mut self,
        group: Option<usize>,
        change: impl Fn(&mut ParamGroup) -> Result<()>,
    ) -> Result<()> {
        if let Some(group) = group {
            self.param_group(group)?;
        }
        capture::refuse(SET, OUTSIDE)?;
        self.take_rates_back()?;
        let mut groups = self.groups.clone();
        for (index, options) in groups.iter_mut().enumerate() {
            if group.is_none_or(|group| group == index) {
                let algorithm = options.algorithm.name();
                change(options)?;
                options.algorithm.check(options.lr)?;
                let given = options.algorithm.name();
                if given != algorithm {
                    return Err(Error::Optimizer(OptimizerError::OtherAlgorithm {
                        algorithm,
                        given,
                    }));
                }
                self.states.check(&options.algorithm)?;
            }
        }
        let before = self.groups.clone();
        self.moving(|optimizer| optimizer.groups = groups);
        self.note_groups(&before);
        Ok(())
    }

    /// The algorithm that steps the parameter at `index`.
    pub(crate) fn algorithm(&self, index: usize) -> Algorithm {
        let slot = &self.slots[index];
        self.groups[slot.group].algorithm.of(slot.is_matrix)
    }

    /// Calls `change`, and drops the states of the parameters that move between Muon and AdamW by it.
    pub(crate) fn moving<T>(&mut self, change: impl FnOnce(&mut Self) -> T) -> T {
        let by_adamw = |optimizer: &Self| -> Vec<_> {
            let slots = optimizer.slots.iter();
            let groups = &optimizer.groups;
            slots.map(|slot| groups[slot.group].algorithm.leaves_to_adamw(slot.is_matrix)).collect()
        };
        let before = by_adamw(self);
        let changed = change(self);
        let moved = before.into_iter().zip(by_adamw(self));
        for (slot, (before, after)) in self.slots.iter_mut().zip(moved) {
            if before != after {
                slot.state.restart();
            }
        }
        changed
    }
}

fn set(option: &mut f64, value: f64) -> Result<()> {
    *option = value;
    Ok(())
}

fn set_momentum(options: &mut ParamGroup, momentum: f64) -> Result<()> {
    let algorithm = options.algorithm.name();
    let missing = Error::Optimizer(OptimizerError::NoSuchOption { option: "momentum", algorithm });
    set(options.algorithm.momentum_mut().ok_or(missing)?, momentum)
}
