//! What can go wrong, and what to do about it.

use tch::{Device, Kind};

use crate::messages::{Number, chain, text};

/// The result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Any error, of the user's own code for instance.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a call was refused. Unless a variant says otherwise, nothing was changed; [`Error::Torch`] may come midway.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device cannot run autocast or hold a scaler here.
    #[error("{device:?} cannot be used: {reason}")]
    DeviceUnavailable {
        /// The device asked for.
        device: Device,
        /// Why, and what to do.
        reason: String,
    },

    /// Autocast has no such dtype.
    #[error(
        "autocast on {device:?} cannot run in {dtype:?}; use Kind::BFloat16 or Kind::Half, or switch the region off with `enabled(false)`"
    )]
    AutocastDtype {
        /// The device of the region.
        device: Device,
        /// The dtype asked for.
        dtype: Kind,
    },

    /// The thread is ending and keeps no autocast state any more.
    #[error(
        "the thread is ending: open autocast regions before its thread-local values are destroyed"
    )]
    ThreadEnding,

    /// A value outside its range, in a configuration, a setter or a loaded state.
    #[error("{field} is {}, but must be {rule}", Number(*value))]
    InvalidValue {
        /// The field, under its PyTorch name.
        field: &'static str,
        /// The value that was given.
        value: f64,
        /// The values that are allowed.
        rule: &'static str,
    },

    /// A tensor of another dtype than that of the numbers asked for.
    #[error(
        "the tensor is {found:?}, and these numbers are {expected:?}; convert it with to_kind({expected:?})"
    )]
    ElementKind {
        /// The dtype of the numbers.
        expected: Kind,
        /// The dtype of the tensor.
        found: Kind,
    },

    /// Only floating outputs can be scaled.
    #[error("a {dtype:?} tensor cannot be scaled; scale a floating loss (convert it with to_kind)")]
    ScaleDtype {
        /// The dtype of the tensor.
        dtype: Kind,
    },

    /// A gradient that the scaler cannot unscale. No gradient was touched.
    #[error("the gradient of {parameter} {problem}")]
    Gradient {
        /// The parameter: its name where it is known, else its place and shape.
        parameter: String,
        /// What is wrong with its gradient, and what to do.
        problem: &'static str,
    },

    /// `unscale_` was called twice for an optimizer.
    #[error(
        "unscale_ has already been called on these parameters; call it once between two update()s"
    )]
    AlreadyUnscaled,

    /// `unscale_` was called after `step` for an optimizer.
    #[error("unscale_ is being called after step on these parameters; call update() first")]
    UnscaleAfterStep,

    /// `step` was called twice for an optimizer.
    #[error("step has already been called on these parameters; call update() first")]
    AlreadyStepped,

    /// libtorch failed while the gradients of an optimizer were being unscaled: some of them are, and some are not. Not
    /// for want of memory: what unscaling takes is allocated before the first gradient changes.
    #[error(
        "libtorch failed while these gradients were being unscaled: zero them, then call abandon or update"
    )]
    UnscaleFailed,

    /// The gradient of a parameter has been unscaled for another list of parameters and would be unscaled twice.
    #[error(
        "{parameter} has already been unscaled with another list of parameters: give it to one optimizer, and add variables before unscale_"
    )]
    SharedParameter {
        /// The parameter: its name where it is known, else its place and shape.
        parameter: String,
    },

    /// A gradient is not the one that was unscaled. The optimizer was not stepped.
    #[error(
        "the gradient of {parameter} {how} between unscale_ and step; run every backward first, and clip before another loss is scaled"
    )]
    GradientChanged {
        /// The parameter: its name where it is known, else its place and shape.
        parameter: String,
        /// What happened to it.
        how: &'static str,
    },

    /// `update` was called though no gradient was checked since the last one.
    #[error(
        "no inf checks were recorded before update(): call step or unscale_ with an optimizer whose parameters have gradients and are not frozen"
    )]
    NoInfChecks,

    /// A call that is only possible between iterations.
    #[error("{call} is only possible between iterations: call update() first")]
    IterationOpen {
        /// The method.
        call: &'static str,
    },

    /// Too many iterations in a row overflowed. The iteration was ended as usual: the scale has backed off.
    #[error(
        "{skips} iterations in a row overflowed (the limit is {limit}) and the scale is down to {}: look for a diverging loss or an infinite input",
        Number(*scale)
    )]
    TooManySkips {
        /// How many so far.
        skips: u32,
        /// `max_consecutive_skips`.
        limit: u32,
        /// The scale after the last of them.
        scale: f64,
    },

    /// An iteration overflowed while the scale was at `min_scale`, and `error_at_min_scale` is set. The iteration was
    /// ended as usual.
    #[error(
        "an iteration overflowed at the smallest scale, {}, which cannot back off: look for a diverging loss or an infinite input, or lower min_scale",
        Number(*scale)
    )]
    ScaleAtMinimum {
        /// The scale.
        scale: f64,
    },

    /// One of [`PerLossScalers`](crate::PerLossScalers) is unscaled, stepped and updated by these alone.
    #[error("this scaler belongs to PerLossScalers: call their {call} instead")]
    PartOfScalers {
        /// The method.
        call: &'static str,
    },

    /// There are fewer losses.
    #[error("there is no loss {loss_id}: these scalers were made for {losses}, counted from 0")]
    NoSuchLoss {
        /// The loss asked for.
        loss_id: usize,
        /// How many there are.
        losses: usize,
    },

    /// A disabled scaler saved an empty state, which an enabled one cannot load.
    #[error(
        "the scaler state is empty, possibly because a disabled GradScaler saved it; start with a new scaler"
    )]
    EmptyState,

    /// A scaler state lacks one of its five keys.
    #[error("the scaler state has no {key}; load one that state_dict() of tch-amp or PyTorch made")]
    MissingKey {
        /// The key.
        key: &'static str,
    },

    /// A buffer of the model (such as a running mean) holds an infinity or a NaN.
    #[error(
        "the buffer {name} holds an infinity or a NaN; restore it before the model is saved (see BufferSnapshot)"
    )]
    NonFiniteBuffer {
        /// Its name in the VarStore.
        name: String,
    },

    /// A checkpoint could not be saved, loaded or restored.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),

    /// A list of parameters is empty.
    #[error(
        "the optimizer got an empty list of parameters; a VarStore may be empty, its variables are taken up when they come"
    )]
    NoParameters,

    /// Only an optimizer with master weights can do that.
    #[error(
        "the optimizer has no master weights: build it with `build_with_master_weights` and other than MasterWeights::None"
    )]
    NoMasterWeights,

    /// A parameter that a fused optimizer cannot take.
    #[error("the parameter {parameter} {problem}")]
    Parameter {
        /// The parameter's name.
        parameter: String,
        /// What is wrong with it, and what to do.
        problem: &'static str,
    },

    /// An optimizer has no such parameter group.
    #[error("there is no parameter group {group}: this optimizer has {groups}, counted from 0")]
    NoSuchGroup {
        /// The number asked for.
        group: usize,
        /// How many groups there are.
        groups: usize,
    },

    /// The algorithm of an optimizer has no such option.
    #[error("{algorithm} has no {option}")]
    NoSuchOption {
        /// The option, under its PyTorch name.
        option: &'static str,
        /// The algorithm.
        algorithm: &'static str,
    },

    /// Options or a state of one algorithm for an optimizer of another.
    #[error(
        "this optimizer is {algorithm} in all its groups, and the options or the state are those of {given}: build that one"
    )]
    OtherAlgorithm {
        /// The optimizer's algorithm.
        algorithm: &'static str,
        /// The one of the options.
        given: &'static str,
    },

    /// An optimizer state that does not fit the optimizer that is to load it.
    #[error("the optimizer state does not fit: {parameter}: {problem}")]
    OptimizerState {
        /// The parameter's name.
        parameter: String,
        /// What is missing, too much or of another shape.
        problem: String,
    },

    /// The norm of the gradients is infinite or NaN. They were not clipped.
    #[error("the norm of the gradients is {}: look for an infinite or NaN loss", Number(*norm))]
    NonFiniteNorm {
        /// The norm.
        norm: f64,
    },

    /// The optimizer's own step failed. It may have changed some of its parameters. The message holds the causes, which
    /// `source()` does not return again.
    #[error("the optimizer's step failed: {}", chain(&**.0))]
    Optimizer(BoxError),

    /// The forward of a custom function failed. The message holds the causes, which `source()` does not return again.
    #[error("{name}: forward failed: {}", chain(&**cause))]
    Function {
        /// The function.
        name: String,
        /// What forward returned.
        cause: BoxError,
    },

    /// A custom function does not fit what it was applied to, or told its context what is not so, or libtorch refused
    /// to record it. Its forward has run, unless the number of gradients or the dtype of `cast_inputs` is what is
    /// wrong.
    #[error("{name}: {problem}")]
    FunctionMisuse {
        /// The function.
        name: String,
        /// What is wrong.
        problem: String,
    },

    /// A function has no such input.
    #[error("there is no input {input}: the function was given {inputs}")]
    NoSuchInput {
        /// The index that was asked for.
        input: usize,
        /// How many inputs there are.
        inputs: usize,
    },

    /// A backward asked for what its forward did not save.
    #[error("backward asked for {wanted}, but forward saved {saved}")]
    NotSaved {
        /// What backward asked for.
        wanted: String,
        /// What there is of it.
        saved: String,
    },

    /// The gradient that backward computes is not that of finite differences.
    #[error(
        "the gradient of output {output} {output_index:?} with respect to input {input} {input_index:?} is {} by backward and {} by finite differences: correct the backward, or loosen atol and rtol",
        Number(*analytic),
        Number(*numeric)
    )]
    GradCheck {
        /// The input.
        input: usize,
        /// The element of the input.
        input_index: Vec<i64>,
        /// The output.
        output: usize,
        /// The element of the output.
        output_index: Vec<i64>,
        /// What backward computed.
        analytic: f64,
        /// What finite differences say.
        numeric: f64,
    },

    /// A function cannot be checked with these inputs, or not at all.
    #[error("cannot check the gradient: {problem}")]
    NotCheckable {
        /// What is in the way.
        problem: String,
    },

    /// A backward gave another gradient when it was run again on the same graph.
    #[error(
        "backward answered differently when it was run again for output {output}: only a deterministic one can be checked"
    )]
    NondeterministicBackward {
        /// The output.
        output: usize,
    },

    /// There is no such level of mixed precision.
    #[error("there is no level `{text}`: write O0, O1, O2 or O3")]
    OptLevelText {
        /// The text.
        text: String,
    },

    /// The text of a policy that cannot be read.
    #[error(
        "cannot read the policy `{text}`: {problem}; write for example `params=float32,compute=bfloat16,output=float32`, `p=f32,c=f16`, `bf16`, `half` or `O1`"
    )]
    PolicyText {
        /// The text.
        text: String,
        /// What is wrong with it, and what is allowed.
        problem: String,
    },

    /// The text of a loss scale that cannot be read.
    #[error(
        "cannot read the loss scale `{text}`: {problem}; write `none`, a number such as `1024`, `dynamic`, or `dynamic:65536` for one that starts there"
    )]
    LossScaleText {
        /// The text.
        text: String,
        /// What is wrong with it.
        problem: String,
    },

    /// A policy casts floating tensors to floating kinds only.
    #[error(
        "the {field} kind of a policy cannot be {kind:?}: use Kind::Float, Kind::Half, Kind::BFloat16 or Kind::Double, for example Policy::MIXED_BF16"
    )]
    PolicyDtype {
        /// The field of the policy: param, compute or output.
        field: &'static str,
        /// The kind that was given.
        kind: Kind,
    },

    /// A module whose parameters have one kind cannot compute in another with autocast.
    #[error(
        "a module with {param:?} parameters cannot compute in {compute:?}: autocast computes in Half or BFloat16 only, over Float, Half or BFloat16; give the policy one kind for both, for example `params=float32,compute=float32`, and cast the variables to it with cast_variables"
    )]
    PolicyModule {
        /// The kind of the parameters.
        param: Kind,
        /// The kind to compute in.
        compute: Kind,
    },

    /// Two trees of tensors that must have the same structure, shapes and kinds differ.
    #[error("the trees differ at `root{place}`: {problem}")]
    TreeMismatch {
        /// The way from the root, such as `.0["weight"][2]`; empty for the root.
        place: String,
        /// What stands there in the one and in the other.
        problem: String,
    },

    /// A loss scale was given the state of another kind of loss scale.
    #[error(
        "this is a {expected} loss scale, and the state is that of a {found} one; make a loss scale from the state instead, with build"
    )]
    OtherLossScale {
        /// The loss scale's kind.
        expected: &'static str,
        /// The state's kind.
        found: &'static str,
    },

    /// libtorch refused, in its own words, or answered what this crate does not know.
    #[error("libtorch: {0}")]
    Torch(String),
}

/// Refuses a value that is outside of its range.
pub(crate) fn ensure(
    field: &'static str,
    value: f64,
    holds: bool,
    rule: &'static str,
) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::InvalidValue { field, value, rule }) }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(text(&error))
    }
}
