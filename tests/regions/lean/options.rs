//! Every option beside PyTorch's operators in f64, and shapes at their limits.

use tch::{Device, Kind, Reduction, Tensor, no_grad};
use tch_amp::lean::{LinearCrossEntropyConfig, linear_cross_entropy, token_log_probs};

use super::{Operands, assert_near, relative, usual};

const REDUCTIONS: [Reduction; 3] = [Reduction::Mean, Reduction::Sum, Reduction::None];

/// Some combinations of options, with and without blocks.
fn configs(device: Device, classes: i64) -> Vec<LinearCrossEntropyConfig> {
    let weights = || Some(Tensor::arange(classes, (Kind::Double, device)).remainder(3) + 0.25);
    let mut configs = Vec::new();
    for reduction in REDUCTIONS {
        for max_bytes in [None, Some(2000)] {
            let new = || LinearCrossEntropyConfig { reduction, max_bytes, ..Default::default() };
            configs.extend([
                new(),
                LinearCrossEntropyConfig { class_weights: weights(), ..new() },
                LinearCrossEntropyConfig { label_smoothing: 0.1, ..new() },
                LinearCrossEntropyConfig { soft_cap: Some(3.0), ..new() },
                LinearCrossEntropyConfig { z_loss: 0.01, ..new() },
                LinearCrossEntropyConfig {
                    class_weights: weights(),
                    label_smoothing: 0.3,
                    soft_cap: Some(5.0),
                    z_loss: 0.02,
                    ignore_index: 3,
                    ..new()
                },
            ]);
        }
    }
    configs
}

/// The weighted sum of a loss, so that each row has a gradient of its own.
fn weighed(loss: &Tensor) -> Tensor {
    if loss.dim() == 0 {
        return loss * 3.0;
    }
    let size = loss.size();
    let factors = Tensor::arange(loss.numel() as i64, (loss.kind(), loss.device())) - 2.0;
    (loss * factors.view(size.as_slice())).sum(loss.kind())
}

#[test]
fn every_option_computes_what_pytorchs_operators_do() {
    testkit::for_each_device(|device| {
        for size in [[24, 12, 50], [5, 4, 9]] {
            let operands = Operands::random(device, size, true);
            for config in configs(device, size[2]) {
                for (kind, most) in [(Kind::Double, 1e-12), (Kind::Float, 3e-6)] {
                    let (ours, theirs) = (operands.to(kind), operands.to(Kind::Double));
                    let [loss, exact] = [ours.loss(&config), usual(&theirs, &config)];
                    let what = format!("{device:?} {kind:?} {config:?}");
                    assert_eq!(loss.kind(), kind, "{what}");
                    assert_eq!(loss.size(), exact.size(), "{what}");
                    assert!(relative(&loss, &exact) < most, "{what}: {loss} {exact}");
                    weighed(&loss).backward();
                    weighed(&exact).backward();
                    assert_near(&ours.gradients(), &theirs.gradients(), most, &what);
                }
            }
        }
    });
}

#[test]
fn log_probabilities_of_tokens_are_those_of_a_log_softmax() {
    testkit::for_each_device(|device| {
        let operands = Operands::random(device, [12, 8, 30], true);
        let targets = operands.targets.masked_fill(&operands.targets.eq(13), -100).view([3, 4]);
        for max_bytes in [None, Some(100)] {
            let [ours, theirs] = [operands.to(Kind::Double), operands.to(Kind::Double)];
            let config = LinearCrossEntropyConfig { max_bytes, ..Default::default() };
            let hidden = ours.hidden.view([3, 4, 8]);
            let bias = ours.bias.as_ref();
            let found = token_log_probs(&hidden, &ours.weight, bias, &targets, &config).unwrap();
            let logs =
                theirs.hidden.linear(&theirs.weight, theirs.bias.as_ref()).log_softmax(-1, None);
            let index = targets.clamp_min(0).view([-1, 1]);
            let expected = logs.gather(1, &index, false).view([3, 4]) * targets.ge(0);
            assert!(relative(&found, &expected) < 1e-12, "{found} {expected}");
            weighed(&found).backward();
            weighed(&expected).backward();
            assert_near(&ours.gradients(), &theirs.gradients(), 1e-12, "gradients");
        }
    });
}

/// No rows, ignored rows alone and one class, whose probability is 1.
#[test]
fn sizes_at_their_limits_are_those_of_pytorch() {
    testkit::for_each_device(|device| {
        for (size, target) in [([0, 4, 6], None), ([5, 4, 6], Some(-100)), ([5, 4, 1], Some(0))] {
            for reduction in REDUCTIONS {
                for max_bytes in [None, Some(64)] {
                    let config =
                        LinearCrossEntropyConfig { reduction, max_bytes, ..Default::default() };
                    let mut operands = Operands::random(device, size, true);
                    if let Some(target) = target {
                        operands.targets = operands.targets.full_like(target);
                    }
                    let [ours, theirs] = [operands.to(Kind::Float), operands.to(Kind::Float)];
                    let [loss, expected] = [ours.loss(&config), usual(&theirs, &config)];
                    let what = format!("{device:?} {size:?} {config:?}");
                    assert!(
                        loss.allclose(&expected, 1e-6, 1e-7, true),
                        "{what}: {loss} {expected}"
                    );
                    weighed(&loss).backward();
                    weighed(&expected).backward();
                    for (ours, theirs) in ours.gradients().iter().zip(theirs.gradients()) {
                        assert!(ours.allclose(&theirs, 1e-6, 1e-7, true), "{what}");
                    }
                }
            }
        }
    });
}

/// Operands that are views, that are frozen, and one tensor that is both the embedding and the head.
#[test]
fn operands_may_be_views_or_frozen_or_tied() {
    testkit::for_each_device(|device| {
        let operands = Operands::random(device, [6, 5, 20], true);
        let config = LinearCrossEntropyConfig::default();
        let [ours, theirs] = [operands.to(Kind::Double), operands.to(Kind::Double)];
        let loss = |own: &Operands, is_lean: bool| {
            let wide = Tensor::cat(&[&own.hidden, &(&own.hidden * 2.0)], 1);
            let every_second = wide.slice(1, 0, 10, 2);
            let transposed = own.weight.tr().contiguous().tr();
            let bias = own.bias.as_ref().map(|bias| bias.expand([20], false));
            let own = Operands { weight: transposed, bias, ..own.with_hidden(every_second) };
            if is_lean { own.loss(&config) } else { usual(&own, &config) }
        };
        loss(&ours, true).backward();
        loss(&theirs, false).backward();
        assert_near(&ours.gradients(), &theirs.gradients(), 1e-12, "of views");
        // Only the bias is trained.
        let frozen = operands.to(Kind::Float);
        let (hidden, weight) = (frozen.hidden.detach(), frozen.weight.detach());
        let loss =
            linear_cross_entropy(&hidden, &weight, frozen.bias.as_ref(), &frozen.targets, &config);
        loss.unwrap().backward();
        assert!(frozen.bias.as_ref().unwrap().grad().defined());
        assert!(!hidden.requires_grad() && !weight.requires_grad());
        // One weight that looks up rows and scores them.
        let [ours, theirs] = [operands.to(Kind::Double), operands.to(Kind::Double)];
        for (own, is_lean) in [(&ours, true), (&theirs, false)] {
            let rows = own.with_hidden(own.weight.index_select(0, &own.targets));
            let tied = Operands { bias: None, targets: own.targets.flip([0]), ..rows };
            (if is_lean { tied.loss(&config) } else { usual(&tied, &config) }).backward();
        }
        assert!(relative(&ours.weight.grad(), &theirs.weight.grad()) < 1e-12);
        no_grad(|| assert!(!operands.loss(&config).requires_grad()));
    });
}
