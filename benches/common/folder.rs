//! The folder of a benchmark's files.

use std::path::PathBuf;

/// A folder for files, which is removed when it is dropped.
#[derive(Debug)]
pub struct Folder(pub PathBuf);

impl Folder {
    /// Creates the folder in `TCH_AMP_BENCH_FOLDER`, or in the folder of temporary files.
    pub fn new() -> Self {
        let parent = std::env::var_os("TCH_AMP_BENCH_FOLDER");
        let parent = parent.map_or_else(std::env::temp_dir, PathBuf::from);
        let path = parent.join(format!("tch-amp-bench-{}", std::process::id()));
        std::fs::create_dir(&path).expect("the folder for the files should exist and be writable");
        Self(path)
    }

    /// The path of a file in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The path of a file as text.
    pub fn text(&self, name: &str) -> String {
        self.file(name).to_str().expect("the name of the folder should be UTF-8").to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}
