//! What the operators that a program calls cost in a recorded iteration, forward and backward.

use std::collections::BTreeMap;

use tch::{Device, Kind};

use crate::ffi::insight::{EventKind, RecordedEvent};
use crate::insight::operators::AutocastList;
use crate::insight::recording::{Pass, Recording};

/// The operator of which there are fused and composed kernels.
pub(super) const ATTENTION: &str = "aten::scaled_dot_product_attention";

/// The nanoseconds of the calls of one size.
pub(super) type BySize = BTreeMap<u64, i64>;

/// Operators, by name.
pub(super) type Costs = BTreeMap<String, BySize>;

/// The costs of the operators that autocast runs in half precision, and of those that it runs in f32.
#[derive(Debug, Default)]
pub(super) struct ListedCosts {
    pub(super) lower: Costs,
    pub(super) f32: Costs,
    /// The nanoseconds in which parameters become half precision and their gradients f32.
    pub(super) weight_casts: i64,
}

/// Adds up the time of each operator that the program calls: with everything in it, such as casts of its inputs, and
/// with the backward pass of all that.
pub(super) fn costs(recording: &Recording, device: Device) -> ListedCosts {
    let mut costs = ListedCosts::default();
    for (index, nanoseconds) in recording.times().0.into_iter().enumerate() {
        let forward = match recording.pass(index) {
            (Pass::Forward, _) => Some(index),
            (Pass::Backward, forward) => forward,
        };
        let Some(forward) = forward else { continue };
        if is_weight_cast(recording, forward) {
            costs.weight_casts += nanoseconds;
        }
        let Some(called) = recording.outermost(forward) else { continue };
        let event = &recording.events[called];
        let list = match AutocastList::of(device, &event.name) {
            AutocastList::LowerPrecision => &mut costs.lower,
            AutocastList::F32 | AutocastList::F32UnlessAsked => &mut costs.f32,
            _ => continue,
        };
        *list.entry(event.name.clone()).or_default().entry(event.size).or_default() += nanoseconds;
    }
    costs
}

/// Whether an operator of the forward pass casts a parameter in f32 to half precision, or is a part of that.
fn is_weight_cast(recording: &Recording, index: usize) -> bool {
    let casts = |event: &RecordedEvent| {
        let (from, to) = (event.inputs.first(), event.outputs.first().and_then(|to| to.kind));
        ["aten::to", "aten::_to_copy"].contains(&event.name.as_str())
            && from.is_some_and(|from| from.parameter.is_some() && from.kind == Some(Kind::Float))
            && matches!(to, Some(Kind::Half | Kind::BFloat16))
    };
    let around = recording.ancestors(index);
    let mut operators = around.take_while(|(_, event)| event.kind == EventKind::Operator);
    operators.any(|(_, event)| casts(event))
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;
    use crate::Autocast;
    use crate::error::Result;
    use crate::ffi::insight::{RecordingMode, Times};
    use crate::insight::recording::RecordedModel;

    /// Each event of the forward pass takes a nanosecond, and each of the backward pass a thousand.
    #[test]
    fn an_operator_costs_what_its_forward_and_its_backward_pass_take() -> Result<()> {
        let device = Device::Cpu;
        let [x, weight] = [false, true].map(|is_weight| {
            Tensor::ones([4, 4], (Kind::Float, device)).set_requires_grad(is_weight)
        });
        let model = RecordedModel::new(vec![("weight".to_owned(), weight.shallow_clone())]);
        let (mut recording, ()) = Recording::of(&model, RecordingMode::Times, || {
            let region = Autocast::new(device).dtype(Kind::BFloat16);
            let loss = region.try_run(|| {
                let result = x.f_matmul(&weight)?;
                Ok::<_, crate::Error>(result.f_mse_loss(&x, tch::Reduction::Sum)?)
            })?;
            Ok(loss.f_backward()?)
        })?;
        let of_node = |index| {
            let node = recording.node(index).map(|node| recording.events[node].name.clone());
            node.unwrap_or_default()
        };
        let nodes: Vec<_> = (0..recording.events.len()).map(of_node).collect();
        for (event, node) in recording.events.iter_mut().zip(&nodes) {
            let ended = if node.is_empty() { 1 } else { 1000 };
            event.times = Times { entered: 0, started: 0, ended, left: 0 };
        }
        let found = costs(&recording, device);
        let of_forward = |operator: &str| {
            let is_inside = |index: &usize| {
                recording.ancestors(*index).any(|(_, event)| event.name == operator)
            };
            (0..nodes.len()).filter(is_inside).count() as i64
        };
        let of_backward = |name: &str| nodes.iter().filter(|node| *node == name).count() as i64;
        let total = |costs: &Costs, operator: &str| costs[operator].values().sum::<i64>();
        let product = total(&found.lower, "aten::matmul");
        let loss = total(&found.f32, "aten::mse_loss");
        assert_eq!(product % 1000, of_forward("aten::matmul"), "{found:?} {nodes:?}");
        assert_eq!(loss % 1000, of_forward("aten::mse_loss"), "{found:?} {nodes:?}");
        let products = of_backward("MmBackward0");
        let losses = of_backward("MseLossBackward0");
        // The casts of inputs are a part of both, and so are their backward passes.
        let casts = of_backward("ToCopyBackward0");
        assert!(products > 0 && losses > 0 && casts > 0, "{nodes:?}");
        assert!(product / 1000 > products && loss / 1000 > losses, "{found:?} {nodes:?}");
        assert_eq!((product + loss) / 1000, products + losses + casts, "{found:?} {nodes:?}");
        Ok(())
    }
}
