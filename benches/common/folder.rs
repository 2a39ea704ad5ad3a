//! Where a benchmark writes its files.

use std::path::PathBuf;

/// A folder for the files, removed at the end.
#[derive(Debug)]
pub struct Folder(pub PathBuf);

impl Folder {
    /// Makes it in `TCH_AMP_BENCH_FOLDER`, or where temporary files are.
    pub fn new() -> Self {
        let parent = std::env::var_os("TCH_AMP_BENCH_FOLDER");
        let parent = parent.map_or_else(std::env::temp_dir, PathBuf::from);
        let path = parent.join(format!("tch-amp-bench-{}", std::process::id()));
        std::fs::create_dir(&path).expect("the folder for the files exists and can be written to");
        Self(path)
    }

    /// The path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The same as a text.
    pub fn text(&self, name: &str) -> String {
        self.file(name).to_str().expect("the folder's name is UTF-8").to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}
