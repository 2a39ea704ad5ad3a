//! The parameters and buffers of a model, and their comparison over the ranks.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::averaged::Averaged;
use crate::distributed::group::ProcessGroup;
use crate::error::{Result, VariableChange};
use crate::ffi::distributed::unwritable;
use crate::ffi::sizes;
use crate::optim::parameters::{Named, TrackedVariables};
use crate::variables::{named, variables};

/// What the ranks have to agree on.
#[derive(Debug)]
pub(super) struct DistributedModel {
    // Before the parameters, because it counts on their being alive.
    pub(super) averaged: Arc<Averaged>,
    store: TrackedVariables,
    /// How many names the variables had when the ranks compared them.
    names: usize,
    /// The variables that require gradients, in the order in which they were added.
    pub(super) parameters: Vec<(String, Tensor)>,
    /// All others: the frozen ones, and then the buffers in the order of their names. They are broadcast once.
    pub(super) others: Vec<(String, Tensor)>,
    /// The buffers among these, which are broadcast before each forward pass.
    pub(super) buffers: Vec<Tensor>,
    /// What the buffers were when the ranks compared them.
    compared: Vec<(Kind, Device, Vec<i64>)>,
}

/// What has to be the same on all ranks for a broadcast.
fn form(tensor: &Tensor) -> Result<(Kind, Device, Vec<i64>)> {
    Ok((tensor.f_kind()?, tensor.device(), sizes(tensor)?))
}

/// The place of a device in a list, which it is added to.
fn place_of(devices: &mut Vec<Device>, device: Device) -> usize {
    devices.iter().position(|known| *known == device).unwrap_or_else(|| {
        devices.push(device);
        devices.len() - 1
    })
}

impl DistributedModel {
    /// The device of the first parameter.
    pub(super) fn device(&self) -> Device {
        self.parameters.first().map_or(Device::Cpu, |(_, parameter)| parameter.device())
    }

    pub(super) fn new(vs: &VarStore) -> Result<Self> {
        let mut store = TrackedVariables::new(vs);
        let (added, count) = store.added(&HashSet::new())?;
        store.taken(count);
        let names = store.named();
        let mut rest: BTreeMap<_, _> = named(variables(vs)?).into_iter().collect();
        let (mut parameters, mut others) = (Vec::new(), Vec::new());
        for Named { names, tensor, .. } in added {
            let name = names.map(|names| names.first).unwrap_or_default();
            drop(rest.remove(&name));
            let list = if tensor.requires_grad() { &mut parameters } else { &mut others };
            list.push((name, tensor));
        }
        let buffers: Vec<_> = rest.values().map(Tensor::shallow_clone).collect();
        let compared = buffers.iter().map(form).collect::<Result<_>>()?;
        others.extend(rest);
        let averaged = Arc::new(Averaged::note(&parameters)?);
        Ok(Self { averaged, store, names, parameters, others, buffers, compared })
    }

    /// Returns a buffer that can no longer be broadcast, by its name, and what has happened to it.
    pub(super) fn changed_buffer(&self) -> Result<Option<(&str, VariableChange)>> {
        let names = self.others.iter().skip(self.others.len() - self.buffers.len());
        let names: Vec<_> = names.map(|(name, _)| name.as_str()).collect();
        for ((buffer, compared), name) in self.buffers.iter().zip(&self.compared).zip(&names) {
            let (kind, device, size) = form(buffer)?;
            let change = match compared {
                _ if buffer.is_sparse() => VariableChange::MadeSparse,
                (was, ..) if *was != kind => VariableChange::Cast,
                (_, was, _) if *was != device => VariableChange::Moved,
                (.., was) if *was != size => VariableChange::Reshaped,
                _ => continue,
            };
            return Ok(Some((name, change)));
        }
        let unwritable = unwritable(&self.buffers)?.and_then(|index| names.get(index));
        Ok(unwritable.map(|name| (*name, VariableChange::Expanded)))
    }

    /// Whether variables were added since.
    pub(super) fn has_more(&self) -> bool {
        self.store.has_more() || self.store.named() > self.names
    }

    /// One line for each variable. The devices are counted, because those of two ranks may have different numbers.
    fn lines(&self) -> String {
        let mut devices = Vec::new();
        let mut line = |what: &str, (name, tensor): &(String, Tensor)| {
            let place = match place_of(&mut devices, tensor.device()) {
                0 => String::new(),
                place => format!(" on device {} of the model", place + 1),
            };
            format!("{what} {name:?}, {:?} {:?}{place}\n", tensor.kind(), tensor.size())
        };
        let parameters: String =
            self.parameters.iter().map(|named| line("the parameter", named)).collect();
        let others = self.others.iter().map(|named| line("the buffer or frozen parameter", named));
        parameters + &others.collect::<String>()
    }

    /// Returns an error unless all ranks have the same model. It names the first difference.
    pub(super) fn compare(&self, group: &ProcessGroup) -> Result<()> {
        let lines = self.lines();
        let hash = xxhash_rust::xxh3::xxh3_64(lines.as_bytes());
        group.compare_lines("DistributedDataParallel of a model", Ok(hash), || lines)
    }
}
