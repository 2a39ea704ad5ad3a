//! The public API: every item, field, method and implementation, compared with a committed list, so that no change is
//! overlooked.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use public_api::PublicItem;
use public_api::tokens::Token;

use crate::args::Args;
use crate::{committed, package, paths, process};

/// The committed list.
const LIST: &str = "xtask/surface.txt";

/// `cargo xtask surface`: rewrites the list, and prints how large the surface is.
pub(crate) fn rewrite_list(args: Args) -> Result<()> {
    args.end()?;
    let surface = Surface::read(&describe()?)?;
    committed::write(LIST, &surface.list)?;
    println!("{}", surface.size);
    Ok(())
}

/// Compares the public API with the list.
pub(crate) fn check() -> Result<()> {
    let now = Surface::read(&describe()?)?;
    let remedy = "if that is right, run `cargo xtask surface`, commit the list and write of it in CHANGELOG.md";
    committed::check(LIST, &now.list, remedy)?;
    println!("{}, as {LIST} says", now.size);
    Ok(())
}

/// Has rustdoc describe the crate with all features, and returns the path of the description. It needs no libtorch.
fn describe() -> Result<PathBuf> {
    let words = "rustdoc --locked --package tch-amp --lib --features doc-only,full --";
    let mut rustdoc = package::without_libtorch(&paths::root(), words);
    process::run(rustdoc.args(JSON).env("RUSTDOC", unstable()?))?;
    Ok(paths::target().join("doc-only/doc/tch_amp.json"))
}

/// Writes a program that starts rustdoc with the variable. If cargo had it, build scripts of dependencies would run
/// again whenever it changes, and what depends on them would be built again.
fn unstable() -> Result<PathBuf> {
    let folder = paths::make(paths::target().join("surface"))?;
    process::script(&folder.join("rustdoc"), &format!("{UNSTABLE}=tch_amp exec rustdoc \"$@\"\n"))
}

/// The options with which rustdoc writes JSON. They are unstable.
const JSON: [&str; 4] = ["-Z", "unstable-options", "--output-format", "json"];

/// The variable that lets a stable toolchain take unstable options for the crates that it names.
const UNSTABLE: &str = "RUSTC_BOOTSTRAP";

/// The public API of a crate.
#[derive(Debug)]
struct Surface {
    /// One line for each item. It must be the same for every toolchain.
    list: String,
    size: Size,
}

impl Surface {
    /// Reads the API off rustdoc's description. Implementations that the compiler or the standard library provides for
    /// every type, and those that are derived, are left out.
    fn read(json: &Path) -> Result<Self> {
        let api = public_api::Builder::from_rustdoc_json(json)
            .omit_blanket_impls(true)
            .omit_auto_trait_impls(true)
            .omit_auto_derived_impls(true)
            .build()
            .with_context(unreadable)?;
        let items: Vec<_> = api.into_items().collect();
        // An implementation may be in several blocks, and belong to several types.
        let mut seen = HashSet::new();
        let lines = items.iter().map(line).filter(|line| seen.insert(line.clone()));
        let list = lines.map(|line| line + "\n").collect();
        Ok(Self { list, size: Size::of(&items) })
    }
}

/// What to do about JSON in a format that the crate `public-api` does not know.
fn unreadable() -> String {
    let rustdoc = process::first_line(Command::new("rustdoc").arg("--version"));
    format!(
        "{} writes JSON that the crate `public-api` of Cargo.lock cannot read. If this Rust is older than {}, use a \
         newer one: `rustup update stable`, then `cargo +stable xtask`. If it is newer, update the crate: \
         `cargo update --package public-api`, or a newer version in xtask/Cargo.toml, then `cargo xtask lock` and \
         `cargo xtask surface`",
        rustdoc.as_deref().unwrap_or("this rustdoc"),
        public_api::MINIMUM_NIGHTLY_RUST_VERSION,
    )
}

/// The text of an item. Of an item of the standard library it has the name alone: the path would be that of the private
/// module that defines it, which changes between releases of Rust.
fn line(item: &PublicItem) -> String {
    let mut line = String::new();
    let mut skips = false;
    for token in item.tokens() {
        match token {
            Token::Identifier(name) if ["alloc", "core", "std"].contains(&&**name) => {
                skips |= !line.ends_with("::");
            }
            Token::Type(_) => skips = false,
            _ => {}
        }
        if !skips {
            line.push_str(token.text());
        }
    }
    line
}

/// How large a public API is.
#[derive(Debug, PartialEq, Eq)]
struct Size {
    /// What modules have: structs, enums, traits, functions, macros, aliases of types, constants, and re-exports of
    /// other crates.
    items: usize,
    /// The methods and functions of types, and those that traits declare.
    methods: usize,
}

impl Size {
    fn of(items: &[PublicItem]) -> Self {
        let parents: HashMap<_, _> = items.iter().map(|item| (item.id(), item)).collect();
        let mut size = Self { items: 0, methods: 0 };
        for item in items {
            let Some(parent) = item.parent_id().and_then(|id| parents.get(&id)) else { continue };
            let of_module = kind(parent) == Some("mod") && kind(item) != Some("mod");
            let of_type = kind(parent) == Some("trait") || is_inherent(parent);
            size.items += usize::from(of_module);
            size.methods += usize::from(of_type && kind(item) == Some("fn"));
        }
        size
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} public items and {} methods", self.items, self.methods)
    }
}

/// The keyword with which an item is declared.
fn kind(item: &PublicItem) -> Option<&str> {
    item.tokens().find_map(|token| match token {
        Token::Kind(word) => Some(&**word),
        _ => None,
    })
}

/// Whether the item is an implementation without a trait.
fn is_inherent(item: &PublicItem) -> bool {
    let text = item.to_string();
    text.starts_with("impl") && !text.contains(" for ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder for a test, without the files of an earlier run.
    fn folder(name: &str) -> PathBuf {
        paths::make_empty(paths::target().join("surface-tests").join(name)).unwrap()
    }

    /// The surface of a crate with this source.
    fn surface(source: &str) -> Surface {
        let folder = folder("items");
        let file = folder.join("sample.rs");
        paths::write(&file, source).unwrap();
        let mut rustdoc = Command::new("rustdoc");
        rustdoc.args(["--crate-name", "sample", "--crate-type", "lib", "--edition", "2024"]);
        rustdoc.args(JSON).env(UNSTABLE, "sample").arg("--out-dir").arg(&folder).arg(file);
        process::run(&mut rustdoc).unwrap();
        Surface::read(&folder.join("sample.json")).unwrap()
    }

    #[test]
    fn every_item_has_a_line_and_methods_are_counted_once() {
        let surface = surface(
            "pub mod shapes {
                #[derive(Clone, Debug)]
                pub struct Shape { pub std: f64 }
                impl Shape { pub fn area(&self) -> std::io::Result<String> { todo!() } }
                impl Shape { pub fn edges<F>(&self, f: F) where F: for<'a> Fn(&'a str) {} }
                impl super::Draw for Shape { fn draw(&self) {} }
                pub struct Shared(Shape);
                impl std::ops::Deref for Shared { type Target = Shape; fn deref(&self) -> &Shape { &self.0 } }
                pub enum Kind { Round, Square(u8) }
                pub const MOST: usize = 3;
                pub type Shapes = std::collections::HashMap<String, Shape>;
            }
            pub trait Draw { fn draw(&self); fn draw_twice(&self) {} }
            pub fn draw(shape: &dyn Draw) {}
            fn private() {}
            #[macro_export] macro_rules! shapes { () => {} }",
        );
        let expected = "\
            pub mod sample\n\
            pub mod sample::shapes\n\
            pub enum sample::shapes::Kind\n\
            pub sample::shapes::Kind::Round\n\
            pub sample::shapes::Kind::Square(u8)\n\
            pub struct sample::shapes::Shape\n\
            pub sample::shapes::Shape::std: f64\n\
            impl sample::shapes::Shape\n\
            pub fn sample::shapes::Shape::area(&self) -> Result<String>\n\
            pub fn sample::shapes::Shape::edges<F>(&self, F) where F: for<'a> Fn(&'a str)\n\
            impl sample::Draw for sample::shapes::Shape\n\
            pub fn sample::shapes::Shape::draw(&self)\n\
            pub fn sample::shapes::Shape::draw_twice(&self)\n\
            pub struct sample::shapes::Shared(_)\n\
            impl Deref for sample::shapes::Shared\n\
            pub type sample::shapes::Shared::Target = sample::shapes::Shape\n\
            pub fn sample::shapes::Shared::deref(&self) -> &sample::shapes::Shape\n\
            pub const sample::shapes::MOST: usize\n\
            pub type sample::shapes::Shapes = HashMap<String, sample::shapes::Shape>\n\
            pub macro sample::shapes!\n\
            pub trait sample::Draw\n\
            pub fn sample::Draw::draw(&self)\n\
            pub fn sample::Draw::draw_twice(&self)\n\
            pub fn sample::draw(&dyn sample::Draw)\n";
        assert_eq!(surface.list, expected);
        assert_eq!(surface.size, Size { items: 8, methods: 4 });
    }

    #[test]
    fn json_in_another_format_is_an_error_that_says_what_to_do() {
        let json = folder("format").join("sample.json");
        paths::write(&json, r#"{"format_version": 1}"#).unwrap();
        let error = Surface::read(&json).unwrap_err().to_string();
        assert!(error.contains("cargo update --package public-api"), "{error}");
    }
}
