//! The folders of the repository, and files and folders with errors that name them.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result};

/// The root of the repository.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_owned()
}

/// The folder of cargo's outputs.
pub fn target() -> PathBuf {
    root().join(env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// The files in a folder of the repository whose names end with `end`, sorted.
pub fn files(folder: &str, end: &str) -> Result<Vec<PathBuf>> {
    let mut files = entries(&root().join(folder))?;
    files.retain(|path| path.is_file() && name(path).ends_with(end));
    Ok(files)
}

/// The same, with those in the folders below it, but neither cargo's outputs nor git's own files. Links to folders are
/// not followed.
pub fn files_below(folder: &str, end: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for path in entries(&folder)? {
            if !path.is_dir() && name(&path).ends_with(end) {
                files.push(path);
            } else if path.is_dir() && !path.is_symlink() && !is_of_tools(&path) {
                folders.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn is_of_tools(folder: &Path) -> bool {
    folder.ends_with(".git") || folder.ends_with("target")
}

/// The path from the root of the repository.
pub fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// The name of a file without its ending.
pub fn stem(file: &Path) -> String {
    file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The name of a file.
pub fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The text of a file.
pub fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))
}

/// Writes a file.
pub fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("{} cannot be written", file.display()))
}

/// Makes a folder unless it exists, and returns it.
pub fn make(folder: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    Ok(folder)
}

/// Makes a folder without what it had before, and returns it.
pub fn make_empty(folder: PathBuf) -> Result<PathBuf> {
    if folder.exists() {
        let cannot = || format!("{} cannot be removed", folder.display());
        fs::remove_dir_all(&folder).with_context(cannot)?;
    }
    make(folder)
}

/// What is in a folder, sorted.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("{} cannot be read", folder.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let mut paths = paths.collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}
