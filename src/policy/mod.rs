//! Precision policies: the dtypes of a model's parameters, of its computation, and of its outputs.
//!
//! A [`Policy`] casts [trees](crate::tree::Tree) of tensors, the variables of a
//! [`VarStore`](crate::Policy::cast_variables), and the inputs and outputs of [modules](crate::Policy::apply_to) and
//! [closures](crate::Policy::run). It is parsed from text, for instance from a command line:
//! `"params=float32,compute=bfloat16,output=float32"`, `"half"`, `"O1"`. The names are those of
//! [jmp](https://github.com/google-deepmind/jmp).

pub(crate) mod dtypes;
mod level;
mod module;
mod parse;
mod variables;

pub use crate::error::PolicyError;
pub(crate) use dtypes::Policy;
pub use dtypes::half_dtype;
pub use level::OptLevel;
pub use module::{PolicyModule, PolicyModuleT, run_in_f32, run_in_f32_t};
pub use variables::KeepF32;
