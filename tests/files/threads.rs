//! Which public types can be sent to another thread (`Send`) and which can be shared by several (`Sync`). The compiler
//! checks it: gaining or losing either trait changes the public API.

use tch::nn::{BatchNorm, Linear};
use tch_amp::accumulation::Accumulation;
use tch_amp::autocast::*;
use tch_amp::average::*;
use tch_amp::buffers::BufferSnapshot;
use tch_amp::checkpoint::*;
use tch_amp::function::*;
use tch_amp::gradcheck::GradCheck;
use tch_amp::gradients::*;
use tch_amp::lean::LinearCrossEntropyConfig;
use tch_amp::loss_scale::*;
use tch_amp::memory::*;
use tch_amp::optim::*;
use tch_amp::policy::*;
use tch_amp::recompute::*;
use tch_amp::scaler::*;
use tch_amp::schedule::*;
use tch_amp::{Advice, Amp, Autocast, Error, GradScaler, MixedPrecision, Policy};

/// Asserts that a type is `Send` and `Sync`.
macro_rules! send_and_sync {
    ($($type:ty),* $(,)?) => { $(const _: fn() = || {
        fn check<T: Send + Sync>() {}
        check::<$type>();
    };)* };
}

/// Asserts that a type is `Send` and not `Sync`.
macro_rules! only_send {
    ($($type:ty),* $(,)?) => { $(const _: fn() = || {
        fn check<T: Send>() {}
        check::<$type>();
        not!($type, Sync);
    };)* };
}

/// Asserts that a type is neither.
macro_rules! stays {
    ($($type:ty),* $(,)?) => { $(const _: fn() = || {
        not!($type, Send);
        not!($type, Sync);
    };)* };
}

/// Asserts that a type lacks a trait. If it had the trait, two implementations of `Ambiguous` would apply, and the call
/// would not compile.
macro_rules! not {
    ($type:ty, $trait:path) => {{
        trait Ambiguous<A> {
            fn check() {}
        }
        struct Lacks;
        struct Has;
        impl<T: ?Sized> Ambiguous<Lacks> for T {}
        impl<T: ?Sized + $trait> Ambiguous<Has> for T {}
        let _: fn() = <$type as Ambiguous<_>>::check;
    }};
}

// Plain values.
send_and_sync!(
    Advice,
    Amp,
    MixedPrecision,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    AdjustLr,
    Algorithm,
    Autocast,
    AutocastState,
    Averaging,
    CheckpointFile,
    CheckpointFolder,
    ClipNorm,
    Closures<fn(), fn()>,
    DeviceMemory,
    DynamicLossScaleState,
    Ema,
    Format,
    GradCheck,
    GradScalerConfig,
    GradScalerState,
    KeepF32<'static>,
    Lion,
    LossScaleState,
    MasterWeights,
    MetricGoal,
    Muon,
    NAdam,
    NoOpLossScale,
    NonFiniteGradient,
    OptLevel,
    ParamGroup,
    ParamGroupState,
    PendingSave,
    Plan,
    Platform,
    Policy,
    Restored,
    RmsProp,
    Rng,
    Rule,
    RunAs,
    SavedTensors,
    Sgd,
    SpikeConfig,
    SpikeCounts,
    Start,
    Swa,
);

// Schedules and their options.
send_and_sync!(
    Annealing,
    ChainedScheduler,
    ConstantLr,
    CosineAnnealingLr,
    CosineAnnealingWarmRestarts,
    ExponentialLr,
    InverseSqrtLr,
    LinearLr,
    LinearWithWarmup,
    MultiStepLr,
    OneCycleLr,
    PlateauScheduler,
    PolynomialLr,
    ReduceLrOnPlateau,
    Schedule,
    SequentialLr,
    StepLr,
    Threshold,
);

// A module behind a lock.
send_and_sync!(Recomputed<Linear>, RecomputedT<BatchNorm>);

// It holds outcomes of steps, which are tensors.
only_send!(Scheduler);

mod insight {
    use run_report::{Document, Plot, Series, Spacing, Table};
    use tch_amp::insight::*;

    send_and_sync!(Document, Plot, Series, Spacing, Table<2>);
    send_and_sync!(
        Audit,
        AutocastList,
        BudgetFile,
        BudgetProblem,
        BudgetReport,
        Cause,
        Culprit,
        Explanation,
        HealthReport,
        HistoryReport,
        OperatorReport,
        Pass,
        SavedReport,
        SkipCause,
        Tuning,
        Values,
        Verdict
    );
    only_send!(Profiler, ScaleHealth, ScaleHistory, Tracer);
}

mod distributed {
    use tch_amp::distributed::*;

    // A store and a group have locks of their own.
    send_and_sync!(DdpConfig, DistributedError, GroupConfig, ProcessGroup, ReduceOp, Store);
    send_and_sync!(DistributedSampler, SamplerConfig);
    only_send!(DistributedDataParallel, Mean, SyncBatchNorm);
}

// Errors must be both, so that `anyhow` and `?` into a boxed error accept them.
send_and_sync!(CheckpointError, Error);

// Types that hold tensors. tch's tensors are `Send`, but not `Sync`: an operation on one thread may change what another
// thread reads.
only_send!(
    Accumulation,
    AveragedWeights,
    BufferSnapshot,
    Checkpoint,
    DynamicLossScale,
    ForwardContext,
    Found,
    GradScaler,
    LinearCrossEntropyConfig,
    Optimizer,
    OptimizerState,
    PerLossScalers,
    PolicyModule<Linear>,
    PolicyModuleT<BatchNorm>,
    SaveState<'static>,
    SpikeDetector,
    StaticLossScale,
    StepOutcome,
    StepCounter,
    SwappedIn<'static>,
);

// A window with its gradients is such a type, and has no name.
const _: fn(&'static mut Accumulation) = |window| {
    fn check<T: Send>(_: &T) {}
    trait Ambiguous<A> {
        fn check(&self) {}
    }
    struct Lacks;
    struct Has;
    impl<T> Ambiguous<Lacks> for T {}
    impl<T: Sync> Ambiguous<Has> for T {}
    let window = window.with_gradients(Vec::new());
    check(&window);
    Ambiguous::check(&window);
};

// Types that borrow tensors, or borrow types that hold tensors, which threads must not share.
stays!(
    BackwardContext<'static>,
    GradConfig<'static>,
    GradOutputs<'static>,
    Parameters<'static>,
    Restore<'static>
);
stays!(Prepared<'static>, SavedState<'static>, Step<'static>, Unscaled<'static>);

// The autocast state belongs to the thread: a guard dropped on another thread would end a region there.
stays!(AutocastGuard);

#[test]
fn types_cross_threads_as_documented() {
    // The compiler has checked everything.
}
