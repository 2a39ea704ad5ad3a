//! The operations of a program, and their text form for the oracle.

use std::fmt;

use tch::Kind;

/// One operation. Tensors are numbered in the order of their creation; all have four rows and columns.
#[derive(Clone, Debug)]
pub enum Op {
    /// Starts a new program: closes all regions and forgets all tensors.
    Program,
    /// A new tensor; a leaf requires gradients.
    Tensor { kind: Kind, leaf: bool, values: Vec<f64> },
    /// Opens a region; options that are `None` keep their defaults.
    Enter { dtype: Option<Kind>, enabled: bool, cache: Option<bool> },
    /// Closes the innermost region.
    Exit,
    /// Enables or disables gradients.
    GradMode(bool),
    /// A new tensor from one or two others.
    Compute(Function, Vec<usize>),
    /// Adds 1/8 to a tensor in place, as an optimizer does.
    Nudge(usize),
    /// Runs backward from the sum of a tensor.
    Backward(usize),
    /// The gradient of a tensor.
    Grad(usize),
}

/// The functions that a program can compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Function {
    Mm,
    Linear,
    /// A convolution with the upper left 3 x 3 corner of the second tensor as the kernel.
    Conv,
    Add,
    /// The first four rows of the concatenation of the two.
    Cat,
    Softmax,
    LayerNorm,
}

impl Function {
    pub const ALL: [Self; 7] =
        [Self::Mm, Self::Linear, Self::Conv, Self::Add, Self::Cat, Self::Softmax, Self::LayerNorm];

    /// The number of operands.
    pub fn operands(self) -> usize {
        if matches!(self, Self::Softmax | Self::LayerNorm) { 1 } else { 2 }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Mm => "mm",
            Self::Linear => "linear",
            Self::Conv => "conv",
            Self::Add => "add",
            Self::Cat => "cat",
            Self::Softmax => "softmax",
            Self::LayerNorm => "layer_norm",
        }
    }
}

/// The oracle's name for a dtype.
pub fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "f32",
        Kind::Double => "f64",
        Kind::BFloat16 => "bf16",
        Kind::Half => "f16",
        _ => panic!("no program uses {kind:?}"),
    }
}

/// The dtype with the oracle's name `name`.
pub fn kind_called(name: &str) -> Kind {
    let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    kinds.into_iter().find(|kind| kind_name(*kind) == name).expect("a kind of the oracle")
}

fn flag(value: Option<bool>) -> &'static str {
    value.map_or("-", |value| if value { "1" } else { "0" })
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Program => write!(f, "program"),
            Self::Tensor { kind, leaf, values } => {
                write!(f, "tensor {} {}", kind_name(*kind), flag(Some(*leaf)))?;
                values.iter().try_for_each(|value| write!(f, " {value}"))
            }
            Self::Enter { dtype, enabled, cache } => {
                let dtype = dtype.map_or("-", kind_name);
                write!(f, "enter {dtype} {} {}", flag(Some(*enabled)), flag(*cache))
            }
            Self::Exit => write!(f, "exit"),
            Self::GradMode(on) => write!(f, "grad_mode {}", flag(Some(*on))),
            Self::Compute(function, operands) => {
                write!(f, "{}", function.name())?;
                operands.iter().try_for_each(|place| write!(f, " {place}"))
            }
            Self::Nudge(place) => write!(f, "nudge {place}"),
            Self::Backward(place) => write!(f, "backward {place}"),
            Self::Grad(place) => write!(f, "grad {place}"),
        }
    }
}
