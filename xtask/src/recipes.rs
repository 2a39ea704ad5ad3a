//! What users are told to copy compiles where it was copied to: the folder `recipes`, with all recipes and with each of
//! them alone.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{package, paths, process, workspace};

/// The paths in `recipes/Cargo.toml`, which a copy does not have.
const PATHS: [&str; 2] = [r#", path = "..""#, r#", path = "../run-report""#];

/// Compiles the copies with the packed crate, without libtorch.
pub(crate) fn check() -> Result<()> {
    let packed = package::packed()?;
    let names = names()?;
    compile(&packed, &names)?;
    for name in &names {
        compile(&packed, std::slice::from_ref(name))?;
    }
    println!("{} recipes compile as a copy, together and each alone", names.len());
    Ok(())
}

/// The names of the recipes.
fn names() -> Result<Vec<String>> {
    let files = paths::files("recipes/examples", ".rs")?;
    Ok(files.iter().map(|file| paths::stem(file)).collect())
}

/// Compiles a copy that has only these recipes.
fn compile(packed: &Path, kept: &[String]) -> Result<()> {
    let copy = copy(packed, kept)?;
    let check = "check --quiet --offline --all-targets --features tch-amp/doc-only";
    process::run(&mut package::without_libtorch(&copy, check))
        .with_context(|| format!("a copy of the recipes {} does not compile", kept.join(", ")))
}

/// Copies the recipes below `target` as a user does, who takes the crate from the registry: here the packed one is in
/// its place.
fn copy(packed: &Path, kept: &[String]) -> Result<PathBuf> {
    let copy = paths::make_empty(paths::target().join("copied/recipes"))?;
    workspace::copy(&paths::root().join("recipes"), &copy)?;
    // The versions that are known to be downloaded.
    workspace::copy(&paths::root().join("Cargo.lock"), &copy.join("Cargo.lock"))?;
    let manifest = copy.join("Cargo.toml");
    let mut text = paths::read(&manifest)?;
    for path in PATHS {
        ensure!(text.contains(path), "recipes/Cargo.toml has no {path}");
        text = text.replace(path, "");
    }
    let packages = [&package::MEMBERS[..], &[package::NAME]].concat();
    text += &package::patches(packed, &packages)?;
    paths::write(&manifest, &(text + "\n[workspace]\n"))?;
    for name in names()?.iter().filter(|name| !is_needed(name, kept)) {
        remove(&copy, name)?;
    }
    Ok(copy)
}

/// Whether a copy of these recipes has this one.
fn is_needed(name: &str, kept: &[String]) -> bool {
    // The demo trains the model of the recipe `gpt`.
    kept.iter().any(|one| one == name || (one == "demo" && name == "gpt"))
}

/// Removes a recipe: its program, its folder and its line in the library.
fn remove(copy: &Path, name: &str) -> Result<()> {
    fs::remove_file(copy.join("examples").join(format!("{name}.rs")))?;
    fs::remove_dir_all(copy.join("src").join(name))?;
    let library = copy.join("src/lib.rs");
    let text = paths::read(&library)?;
    let line = format!("pub mod {name};\n");
    ensure!(text.contains(&line), "recipes/src/lib.rs has no line {line}");
    paths::write(&library, &text.replace(&line, ""))
}
