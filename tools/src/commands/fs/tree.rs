//! `sealblock fs tree`: the nodes and items of trees.

use std::io::{self, BufWriter, Write};

use sealblock_btrfs::{Filesystem, FsError, TreeRoot};
use sealblock_btrfs_format::checker::Expected;
use sealblock_stack::filesystem::filesystem_error;
use sealblock_stack::{Cause, StackError};

use super::place::with_filesystem;
use crate::cli::FsTree;
use crate::exit::Exit;
use crate::report::{self, note};

/// Prints them.
pub fn run(arguments: &FsTree) -> Result<Exit, StackError> {
    let name = &arguments.filesystem;
    with_filesystem(name, async |open| {
        let filesystem = &open.filesystem;
        let fail = |error| filesystem_error("find the tree", &error).on(name);
        let (trees, lost) = match arguments.tree {
            None => filesystem.trees().await,
            Some(id) => {
                let tree = filesystem.tree(id).await.map_err(fail)?;
                (vec![tree.ok_or_else(|| fail(FsError::Absent(format!("tree {id}"))))?], Vec::new())
            }
        };
        let mut is_damaged = !lost.is_empty();
        lost.iter().for_each(|lost| note(&format_args!("{}: {lost}", name.devices())));
        let mut out = BufWriter::new(io::stdout());
        for tree in trees {
            is_damaged |= print_tree(filesystem, tree, &mut out, &name.devices()).await?;
        }
        out.flush().map_err(output_error)?;
        Ok(if is_damaged { Exit::DamageFound } else { Exit::Clean })
    })
}

fn output_error(error: io::Error) -> StackError {
    match error.kind() {
        io::ErrorKind::BrokenPipe => StackError::new(Cause::Unread, "print", "the reader is gone"),
        _ => report::output_error(&error),
    }
}

/// Prints a tree, each node before its children. True if some of it is lost.
async fn print_tree(
    filesystem: &Filesystem,
    tree: TreeRoot,
    out: &mut impl Write,
    name: &str,
) -> Result<bool, StackError> {
    writeln!(out, "tree {} root {} level {} generation {}", tree.id, tree.bytenr, tree.level, tree.generation)
        .map_err(output_error)?;
    let (mut pending, mut is_damaged) = (vec![tree.expected()], false);
    while let Some(expected) = pending.pop() {
        match print_node(filesystem, tree.id, &expected, out).await {
            Ok(children) => pending.extend(children.into_iter().rev()),
            Err(Failed::Lost(lost)) => {
                is_damaged = true;
                out.flush().map_err(output_error)?;
                note(&format_args!("{name}: tree {}: {lost}", tree.id));
            }
            Err(Failed::Output(error)) => return Err(output_error(error)),
        }
    }
    Ok(is_damaged)
}

enum Failed {
    Lost(FsError),
    Output(io::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Failed {
        Failed::Output(error)
    }
}

async fn print_node(
    filesystem: &Filesystem,
    tree: u64,
    expected: &Expected,
    out: &mut impl Write,
) -> Result<Vec<Expected>, Failed> {
    let node = filesystem.nodes().load(expected).await.map_err(Failed::Lost)?;
    let view = node.view();
    let header = view.header();
    let (bytenr, level, generation, owner) = (header.bytenr, header.level, header.generation, header.owner);
    if level == 0 {
        let items = view.items();
        writeln!(out, "leaf {bytenr} items {} generation {generation} owner {owner}", items.len())?;
        for (slot, item) in items.iter().enumerate() {
            writeln!(out, "  {slot} {} at {} bytes {}", item.key(), item.offset, item.size)?;
        }
        return Ok(Vec::new());
    }
    let pointers = view.pointers();
    writeln!(out, "node {bytenr} level {level} pointers {} generation {generation} owner {owner}", pointers.len())?;
    for (slot, pointer) in pointers.iter().enumerate() {
        writeln!(out, "  {slot} {} block {} generation {}", pointer.key(), pointer.blockptr, pointer.generation)?;
    }
    // No deeper than eight levels, and a node has its children once each.
    Ok((0..pointers.len()).filter_map(|slot| node.child(slot, tree)).collect())
}
