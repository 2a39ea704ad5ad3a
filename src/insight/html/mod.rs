//! What HTML pages are made of: plots, heat maps and tables. The recipes in `examples` include these files, too, so
//! they use nothing of the crate.
#![allow(dead_code, reason = "each page uses a part of it")]

pub(super) mod axis;
pub(super) mod escape;
pub(super) mod heat_map;
pub(super) mod page;
pub(super) mod plot;
pub(super) mod table;
