//! Parts of guests that are made once: kernels, programs.
//!
//! A part is a folder whose name says what it was made from. It appears under that name when it is complete, so one that was
//! interrupted is made again.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Changes when parts that are there should be made again.
const VERSION: u32 = 1;

/// The folder of a part, made by `build` if it is not there. `recipe` is what it is made from.
///
/// # Errors
/// Those of `build`.
pub fn part(home: &Path, name: &str, recipe: &[&str], build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    (VERSION, recipe).hash(&mut hasher);
    let folder = home.join(format!("{name}-{:016x}", hasher.finish()));
    if folder.is_dir() {
        return Ok(folder);
    }
    let unfinished = home.join(format!("{name}.unfinished"));
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).with_context(|| format!("removing {}", unfinished.display()))?;
    }
    fs::create_dir_all(&unfinished).with_context(|| format!("making {}", unfinished.display()))?;
    build(&unfinished)?;
    fs::rename(&unfinished, &folder).with_context(|| format!("naming {}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_made_once_for_a_recipe_and_never_half() {
        let home = tempfile::tempdir().unwrap();
        let make = |recipe: &[&str], content: &'static str| {
            part(home.path(), "p", recipe, |folder| Ok(fs::write(folder.join("f"), content)?)).unwrap()
        };
        let broken = part(home.path(), "p", &["a"], |folder| {
            fs::write(folder.join("half"), "")?;
            anyhow::bail!("interrupted")
        });
        assert!(broken.is_err());
        let first = make(&["a"], "one");
        assert!(!first.join("half").exists());
        assert_eq!(make(&["a"], "two"), first);
        assert_eq!(fs::read_to_string(first.join("f")).unwrap(), "one");
        assert_ne!(make(&["b"], "three"), first);
    }
}
