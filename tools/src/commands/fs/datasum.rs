//! `sealblock fs datasum`, and `--datasum` of the commands that make files: where the checksums of data are kept.

use sealblock_btrfs_engine::datasum::Datasum;
use sealblock_stack::filesystem::FilesystemName;
use sealblock_stack::{Cause, StackError};
use serde::Serialize;

use super::paths::Node;
use super::write::{Done, Order, Writer, change, engine_error, now};
use crate::cli::{DatasumChoice, FsDatasum};
use crate::exit::Exit;

/// Files whose checksums are kept there now, in JSON.
#[derive(Serialize)]
struct Changed {
    datasum: &'static str,
    /// Whether whoever writes makes the checksums that devices keep, in the whole filesystem.
    host_sealed: bool,
    files: Vec<ChangedFile>,
}

#[derive(Serialize)]
struct ChangedFile {
    name: String,
    subvolume: u64,
    ino: u64,
}

impl Done for Changed {}

/// The name of a place of checksums, as on the command line.
fn datasum_name(datasum: Datasum) -> &'static str {
    match datasum {
        Datasum::Csum => "csum",
        Datasum::Device => "device",
    }
}

/// Sets where the checksums of data are kept.
pub fn run(arguments: &FsDatasum) -> Result<Exit, StackError> {
    let names: Vec<&FilesystemName> = arguments.names.iter().collect();
    let order = Order { names: &names, json: arguments.json, needs_subvolumes: false };
    change(&order, async |writer| {
        let DatasumChoice { datasum, is_host_sealed } = arguments.datasum;
        writer.check_datasum(Some(datasum))?;
        let mut files = Vec::new();
        for name in &arguments.names {
            let node = writer.existing(name).await?;
            writer.set_datasum(node, Some(datasum), &name.to_string()).await?;
            files.push(ChangedFile { name: name.to_string(), subvolume: node.root, ino: node.ino });
        }
        if let Some(is_host_sealed) = is_host_sealed {
            writer.engine.devices().set_host_sealed(is_host_sealed);
        }
        let host_sealed = writer.engine.devices().is_host_sealed();
        Ok(Changed { datasum: datasum_name(datasum), host_sealed, files })
    })
}

impl Writer {
    /// Refuses to keep the checksums of data on devices that cannot, before anything is made.
    pub fn check_datasum(&self, wanted: Option<Datasum>) -> Result<(), StackError> {
        let without = match wanted {
            Some(Datasum::Device) => self.engine.devices_without_sums(),
            Some(Datasum::Csum) | None => Vec::new(),
        };
        match without.first() {
            None => Ok(()),
            Some(first) => {
                let why = "it has no protection information, or does not check it or keep application tags, so it cannot \
                           keep the checksums of data";
                let refused = StackError::new(Cause::Unsuitable, "use --datasum device on", why).on(first);
                Err(refused.advise("`sealblock create` makes protected volumes"))
            }
        }
    }

    /// Sets where the checksums of the data of a new file, or of those in a directory, are kept; `None` leaves it.
    pub async fn set_datasum(&self, node: Node, wanted: Option<Datasum>, shown: &str) -> Result<(), StackError> {
        let Some(datasum) = wanted else { return Ok(()) };
        let set = self.engine.set_datasum(node.root, node.ino, datasum, now()).await;
        set.map(drop).map_err(|error| engine_error("set where checksums are kept of", &error).on(shown))
    }
}
