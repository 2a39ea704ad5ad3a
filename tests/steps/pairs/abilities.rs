//! The abilities that can meet in a training, and the pairs of them that cannot.

use Ability::*;

/// Declares the abilities, and a list of all.
macro_rules! abilities {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a training can make use of. A new ability of the crate is a row here.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Ability {
            $($(#[$doc])* $name,)*
        }

        pub const ALL: &[Ability] = &[$($name),*];
    };
}

abilities! {
    /// A region that is switched off inside of the one around the forward pass.
    OffInside,
    /// The region around the forward pass is switched off, before a plan if there is one.
    OffBefore,
    /// A region of the other half precision inside.
    OtherDtypeInside,
    /// A plan that keeps all products in f32.
    PlanInF32,
    /// A plan that composes attention.
    Composed,
    /// A list of operators that the region keeps in f32.
    Kept,
    /// The cache of casts is off.
    CacheOff,
    /// The backward pass is inside of the region.
    BackwardInside,
    /// The loss has a penalty on its own gradients.
    Penalty,
    /// A disabled scaler.
    Disabled,
    /// A scaler that skips and does not scale.
    SkipOnly,
    /// A scaler for each of two losses.
    PerLoss,
    /// `step_clip_norm`.
    ClipNorm,
    /// `step_clip_value`.
    ClipValue,
    /// `step_unless_spike`.
    UnlessSpike,
    /// `unscale_`, clipping by hand, `step`.
    UnscaleAndClip,
    /// tch's optimizer.
    HostOptimizer,
    /// A second optimizer, whose `backward_step` ends the iteration.
    SecondOptimizer,
    /// Parameters in bf16 with master weights in f32.
    Masters,
    /// Parameters in bf16 with the rest of their master weights.
    Remainders,
    /// Moments in bf16.
    LowBit,
    /// Muon.
    Muon,
    /// NAdam.
    NAdam,
    /// Adafactor.
    Adafactor,
    /// A window of micro-batches.
    Accumulation,
    /// A learning-rate schedule that follows the steps that were taken.
    Schedule,
    /// An average of the weights.
    Average,
    /// Counts of the steps that were taken and skipped.
    Counter,
    /// The statistics of batch normalization for averaged weights.
    BatchNorm,
    /// The forward pass is recomputed in the backward pass.
    Recompute,
    /// An activation that is a custom function.
    CustomFunction,
    /// What the forward pass saves goes through hooks, which keep tensors as small as these as they are.
    Hooks,
    /// The loss has a cross entropy of logits that are kept once, or by the block.
    Lean,
    /// Linear layers of a normalization and of an activation, which keep the inputs of these.
    LeanLayers,
    /// Two ranks with gradients averaged by `DistributedDataParallel`.
    Ranks,
    /// The same, with a micro-batch whose gradients are not averaged.
    NoSync,
    /// The same, with an optimizer whose state is divided among the ranks.
    Sharded,
    /// Iterations are captured and replayed, or run where there is no GPU.
    Graph,
    /// Everything is saved in the middle and loaded into new objects.
    Restored,
}

/// Abilities that change no bit of the weights: a program without one of them trains the same.
pub const NEUTRAL: [Ability; 7] =
    [CacheOff, Average, Counter, BatchNorm, Recompute, Hooks, Restored];

/// Options of which a program has one, or in which one already contains the other.
const ONE_OF: [&[Ability]; 10] = [
    &[OffInside, OtherDtypeInside],
    &[PlanInF32, Composed],
    &[Disabled, SkipOnly, PerLoss],
    &[ClipNorm, ClipValue, UnlessSpike, UnscaleAndClip],
    &[Masters, Remainders],
    &[HostOptimizer, Muon, NAdam, Adafactor],
    &[HostOptimizer, LowBit, NAdam, Adafactor],
    &[Ranks, NoSync, Sharded],
    &[Accumulation, NoSync],
    &[CustomFunction, LeanLayers],
];

/// Pairs that do not compile, since a type has no such method or takes no such argument.
const NO_SUCH_CALL: [(Ability, Ability, &str); 10] = [
    (PerLoss, UnlessSpike, "`PerLossScalers` has no `step_unless_spike`"),
    (PerLoss, UnscaleAndClip, "`PerLossScalers` has no `unscale_`; it clips in its steps"),
    (PerLoss, SecondOptimizer, "`PerLossScalers` has no `backward_step`"),
    (PerLoss, Accumulation, "`Accumulation::backward` takes a `GradScaler`"),
    (PerLoss, Ranks, "`backward_scaled` takes a `GradScaler`"),
    (PerLoss, NoSync, "`backward_scaled` takes a `GradScaler`"),
    (PerLoss, Sharded, "`backward_scaled` takes a `GradScaler`"),
    (HostOptimizer, UnlessSpike, "`step_unless_spike` takes a fused `Optimizer`"),
    (HostOptimizer, Sharded, "`shard_over` is a method of the fused `Optimizer`"),
    (HostOptimizer, Restored, "tch's optimizers do not give away their state"),
];

const ONE_DEVICE: &str = "graphs are of one device";

/// Pairs that are refused when a program runs, with a part of the error.
const REFUSED: [(Ability, Ability, &str); 5] = [
    (Penalty, Lean, "the gradients of linear_cross_entropy cannot be differentiated"),
    (HostOptimizer, Graph, "an optimizer that does not take scaled gradients"),
    (Ranks, Graph, ONE_DEVICE),
    (NoSync, Graph, ONE_DEVICE),
    (Sharded, Graph, ONE_DEVICE),
];

/// Why a program cannot have both, if it cannot.
pub fn cannot_meet(one: Ability, other: Ability) -> Option<String> {
    if ONE_OF.iter().any(|options| options.contains(&one) && options.contains(&other)) {
        return Some("a program has one of them".to_owned());
    }
    found(&NO_SUCH_CALL, one, other).map(str::to_owned)
}

fn found(
    pairs: &[(Ability, Ability, &'static str)],
    one: Ability,
    other: Ability,
) -> Option<&'static str> {
    let fits = |a: Ability, b: Ability| (a, b) == (one, other) || (b, a) == (one, other);
    pairs.iter().find(|(a, b, _)| fits(*a, *b)).map(|(_, _, why)| *why)
}

/// The error by which a program with both is refused, if it is.
pub fn refusal(one: Ability, other: Ability) -> Option<&'static str> {
    found(&REFUSED, one, other)
}

/// The pairs that cannot meet, as rows of the table in tests/README.md.
pub fn rows() -> String {
    let names = |abilities: &[Ability]| {
        let names: Vec<_> = abilities.iter().map(|ability| format!("{ability:?}")).collect();
        names.join(", ")
    };
    let mut rows = String::from("| abilities | why they do not meet |\n|---|---|\n");
    for options in ONE_OF {
        rows += &format!("| {} | a program has one of them |\n", names(options));
    }
    for (one, other, why) in NO_SUCH_CALL {
        rows += &format!("| {} | does not compile: {why} |\n", names(&[one, other]));
    }
    for (one, other, why) in REFUSED {
        rows += &format!("| {} | refused: \"{why}\" |\n", names(&[one, other]));
    }
    rows
}
