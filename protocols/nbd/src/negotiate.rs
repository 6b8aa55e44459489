//! The fixed newstyle negotiation: client flags and options, until an export is chosen. The only metadata contexts are
//! `base:allocation`, the name of a session, and whether blocks may be older.

use crate::config::Export;
use crate::input::Step;
use crate::reply::ReplyStyle;
use crate::server::{Event, Server, ServerPhase};
use crate::session_name::SessionName;
use crate::violation::{Closed, Violation};
use crate::wire::FieldReader;
use crate::wire::{self, BASE_ALLOCATION, IDENTITY, OLDER, STRING_BYTES, handshake, info, option, rep};

impl Server {
    pub(crate) fn greet(&mut self) {
        self.output.put(&wire::INIT_MAGIC.to_be_bytes());
        self.output.put(&wire::OPTION_MAGIC.to_be_bytes());
        self.output.put(&(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
    }

    pub(crate) fn client_flags(&mut self) -> Result<Step<Event>, Closed> {
        let Some(mut fields) = self.input.peek(4).map(FieldReader) else { return Ok(Step::Wait) };
        let flags = fields.u32().unwrap_or(0);
        self.input.take(4);
        if flags & !u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES) != 0 {
            return Err(Violation::ClientFlags(flags).into());
        }
        self.negotiation.is_fixed = flags & u32::from(handshake::FIXED_NEWSTYLE) != 0;
        self.negotiation.no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
        self.phase = ServerPhase::OptionHeader;
        Ok(Step::Again)
    }

    pub(crate) fn option_header(&mut self) -> Result<Step<Event>, Closed> {
        let Some(mut fields) = self.input.peek(wire::OPTION_HEADER_BYTES).map(FieldReader) else {
            return Ok(Step::Wait);
        };
        let magic = fields.u64().unwrap_or(0);
        let (option, len) = (fields.u32().unwrap_or(0), fields.u32().unwrap_or(0));
        self.input.take(wire::OPTION_HEADER_BYTES);
        if magic != wire::OPTION_MAGIC {
            return Err(Violation::OptionMagic(magic).into());
        }
        let limits = &self.config.limits;
        self.negotiation.options += 1;
        self.negotiation.option_bytes += u64::from(len);
        if self.negotiation.options > limits.options {
            return Err(Violation::TooManyOptions(limits.options).into());
        }
        if self.negotiation.option_bytes > limits.negotiation_bytes {
            return Err(Violation::NegotiationBytes(limits.negotiation_bytes).into());
        }
        let len = len as usize;
        let is_too_big = len > limits.option_bytes;
        self.phase = if is_too_big {
            ServerPhase::SkipOption { option, left: len }
        } else {
            ServerPhase::Option { option, len }
        };
        Ok(Step::Again)
    }

    pub(crate) fn skip_option(&mut self, option: u32, left: usize) -> Result<Step<Event>, Closed> {
        let left = left - self.input.take(left).len();
        if left > 0 {
            self.phase = ServerPhase::SkipOption { option, left };
            return Ok(Step::Wait);
        }
        self.phase = ServerPhase::OptionHeader;
        match option {
            option::ABORT => self.option(option, &[]),
            option::EXPORT_NAME => Err(Violation::UnknownExport.into()),
            _ => Ok(self.reply(option, rep::ERR_TOO_BIG)),
        }
    }

    pub(crate) fn whole_option(&mut self, option: u32, len: usize) -> Result<Step<Event>, Closed> {
        let Some(data) = self.input.peek(len).map(<[u8]>::to_vec) else { return Ok(Step::Wait) };
        self.input.take(len);
        self.phase = ServerPhase::OptionHeader;
        self.option(option, &data)
    }

    fn option(&mut self, option: u32, data: &[u8]) -> Result<Step<Event>, Closed> {
        if !self.negotiation.is_fixed && option != option::EXPORT_NAME {
            return Err(Violation::Misplaced(option).into());
        }
        let has_data = !data.is_empty();
        let is_extended = self.negotiation.style == ReplyStyle::Extended;
        match option {
            option::EXPORT_NAME => return self.export_name(data),
            option::ABORT => {
                self.reply(option, rep::ACK);
                return Err(Closed::Aborted);
            }
            _ if self.is_stopping => return Ok(self.reply(option, rep::ERR_SHUTDOWN)),
            option::INFO | option::GO => return Ok(self.describe(option, data)),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => return Ok(self.contexts(option, data)),
            option::LIST | option::STARTTLS | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS if has_data => {
                return Ok(self.reply(option, rep::ERR_INVALID));
            }
            option::STRUCTURED_REPLY if is_extended => return Ok(self.reply(option, rep::ERR_EXT_HEADER_REQD)),
            option::STRUCTURED_REPLY => self.negotiation.style = ReplyStyle::Structured,
            option::EXTENDED_HEADERS => self.negotiation.style = ReplyStyle::Extended,
            option::LIST => self.list(),
            // STARTTLS too ("NOTLS mode"). To add TLS, acknowledge it, hand the stream to a TLS library below this core, and
            // discard the negotiation before it.
            _ => return Ok(self.reply(option, rep::ERR_UNSUP)),
        }
        Ok(self.reply(option, rep::ACK))
    }

    /// A reply to an option without data.
    fn reply(&mut self, option: u32, kind: u32) -> Step<Event> {
        self.reply_with(option, kind, &[]);
        Step::Again
    }

    fn reply_with(&mut self, option: u32, kind: u32, data: &[u8]) {
        self.output.put(&wire::OPTION_REPLY_MAGIC.to_be_bytes());
        self.output.put(&option.to_be_bytes());
        self.output.put(&kind.to_be_bytes());
        self.output.put(&(data.len() as u32).to_be_bytes());
        self.output.put(data);
        self.output.end_reply();
    }

    fn list(&mut self) {
        let exports = std::sync::Arc::clone(&self.config.exports);
        for Export { name, description, .. } in exports.iter() {
            let len = (name.len() as u32).to_be_bytes();
            let data = [&len[..], name.as_bytes(), description.as_bytes()].concat();
            self.reply_with(option::LIST, rep::SERVER, &data);
        }
    }

    /// The export of this name; the empty name means the default, unless an export has the empty name.
    fn find(&self, name: &[u8]) -> Option<usize> {
        let exports = &self.config.exports;
        let named = exports.iter().position(|export| export.name.as_bytes() == name);
        named.or(self.config.default_export.filter(|place| name.is_empty() && *place < exports.len()))
    }

    fn flags(&self, export: &Export) -> u16 {
        export.flags(self.negotiation.style != ReplyStyle::Simple)
    }

    fn export_name(&mut self, name: &[u8]) -> Result<Step<Event>, Closed> {
        if self.negotiation.style == ReplyStyle::Extended {
            return Err(Violation::Misplaced(option::EXPORT_NAME).into());
        }
        let export_index = self.find(name).filter(|_| !self.is_stopping && name.len() <= STRING_BYTES);
        let Some(index) = export_index else {
            self.end(Violation::UnknownExport.into());
            return Ok(unknown(name));
        };
        let export = &self.config.exports[index];
        let (size, flags) = (export.size_bytes.to_be_bytes(), self.flags(export).to_be_bytes());
        self.output.put(&size);
        self.output.put(&flags);
        if !self.negotiation.no_zeroes {
            self.output.put(&[0; wire::EXPORT_NAME_ZEROES]);
        }
        Ok(self.choose(index, name))
    }

    fn choose(&mut self, index: usize, name: &[u8]) -> Step<Event> {
        self.negotiation.names_none = name.is_empty();
        self.negotiation.context = self.negotiation.context.filter(|export| *export == index);
        self.chosen = Some(index);
        self.phase = ServerPhase::Request;
        Step::Event(Event::Chosen(index))
    }

    /// INFO and GO.
    fn describe(&mut self, option: u32, data: &[u8]) -> Step<Event> {
        let Some((name, wanted)) = read_info(data) else { return self.reply(option, rep::ERR_INVALID) };
        let Some(index) = self.find(name) else {
            self.reply(option, rep::ERR_UNKNOWN);
            return unknown(name);
        };
        let exports = std::sync::Arc::clone(&self.config.exports);
        let export = &exports[index];
        let mut put_info = |kind: u16, fields: &[&[u8]]| {
            self.reply_with(option, rep::INFO, &[&kind.to_be_bytes()[..], &fields.concat()].concat());
        };
        if wanted.contains(&info::NAME) {
            put_info(info::NAME, &[export.name.as_bytes()]);
        }
        if wanted.contains(&info::DESCRIPTION) && !export.description.is_empty() {
            put_info(info::DESCRIPTION, &[export.description.as_bytes()]);
        }
        // Sent even if not requested: requests that ignore the block sizes fail.
        let max_bytes = self.config.limits.payload_bytes;
        let best = export.block_bytes.max(4096).min(max_bytes.next_power_of_two());
        self.put_block_sizes(option, [export.block_bytes, best, max_bytes]);
        let flags = self.flags(export).to_be_bytes();
        let about = [&info::EXPORT.to_be_bytes()[..], &export.size_bytes.to_be_bytes(), &flags].concat();
        self.reply_with(option, rep::INFO, &about);
        self.reply(option, rep::ACK);
        if option == option::GO { self.choose(index, name) } else { Step::Again }
    }

    fn put_block_sizes(&mut self, option: u32, sizes: [u32; 3]) {
        let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
        data.extend(sizes.into_iter().flat_map(u32::to_be_bytes));
        self.reply_with(option, rep::INFO, &data);
    }

    /// LIST_META_CONTEXT and SET_META_CONTEXT.
    fn contexts(&mut self, option: u32, data: &[u8]) -> Step<Event> {
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            (self.negotiation.context, self.negotiation.session) = (None, None);
        }
        let query = ContextQuery::read(data).filter(|_| self.negotiation.style != ReplyStyle::Simple);
        let Some(query) = query else { return self.reply(option, rep::ERR_INVALID) };
        let Some(index) = self.find(query.export) else { return self.reply(option, rep::ERR_UNKNOWN) };
        if sets && query.selects() {
            self.negotiation.context = Some(index);
        }
        if if sets { query.selects() } else { query.lists() } {
            self.reply_with(option, rep::META_CONTEXT, &context_reply(sets));
        }
        if let Some(session) = query.session.filter(|_| sets && self.config.fences_sessions) {
            self.negotiation.session = Some((index, session));
            let reply = [&wire::SESSION_ID.to_be_bytes()[..], session.to_string().as_bytes()].concat();
            self.reply_with(option, rep::META_CONTEXT, &reply);
        }
        if query.older && sets {
            let name = format!("{OLDER}={:02x}", self.config.exports[index].older);
            let reply = [&wire::OLDER_ID.to_be_bytes()[..], name.as_bytes()].concat();
            self.reply_with(option, rep::META_CONTEXT, &reply);
        }
        if query.identity && sets {
            for (id, name) in self.config.exports[index].identity.identity().contexts() {
                let reply = [&id.to_be_bytes()[..], name.as_bytes()].concat();
                self.reply_with(option, rep::META_CONTEXT, &reply);
            }
        }
        self.reply(option, rep::ACK)
    }
}

/// Reports that a client requested an unknown export.
fn unknown(name: &[u8]) -> Step<Event> {
    let name = &name[..name.len().min(STRING_BYTES)];
    Step::Event(Event::Unknown(String::from_utf8_lossy(name).into_owned()))
}

/// The name and the information that INFO or GO requests.
fn read_info(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let mut fields = FieldReader(data);
    let name = fields.string().filter(|name| name.len() <= STRING_BYTES)?;
    let wanted = (0..fields.u16()?).map(|_| fields.u16()).collect::<Option<Vec<u16>>>()?;
    fields.end()?;
    Some((name, wanted))
}

/// The query of LIST_META_CONTEXT or SET_META_CONTEXT.
pub(crate) struct ContextQuery<'a> {
    pub(crate) export: &'a [u8],
    queries: u32,
    /// True if a query names the context.
    exact: bool,
    /// True if a query names all of the namespace `base`.
    wild: bool,
    /// The session that a query names; the last of several.
    session: Option<SessionName>,
    /// True if a query asks whether blocks may be older.
    older: bool,
    /// True if a query asks what the export is.
    identity: bool,
}

impl<'a> ContextQuery<'a> {
    /// `None` if it is malformed. Ignores queries of other namespaces ("Metadata querying").
    pub(crate) fn read(data: &'a [u8]) -> Option<ContextQuery<'a>> {
        let mut fields = FieldReader(data);
        let export = fields.string().filter(|name| name.len() <= STRING_BYTES)?;
        let queries = fields.u32()?;
        let (mut exact, mut wild, mut session, mut older, mut identity) = (false, false, None, false, false);
        for _ in 0..queries {
            let query = fields.string()?;
            exact |= query == BASE_ALLOCATION.as_bytes();
            wild |= query == b"base:";
            session = SessionName::parse(query).or(session);
            older |= query == OLDER.as_bytes();
            identity |= query == IDENTITY.as_bytes();
        }
        fields.end()?;
        Some(ContextQuery { export, queries, exact, wild, session, older, identity })
    }

    /// True if LIST_META_CONTEXT lists the context.
    pub(crate) fn lists(&self) -> bool {
        self.queries == 0 || self.exact || self.wild
    }

    /// True if SET_META_CONTEXT chooses the context.
    pub(crate) fn selects(&self) -> bool {
        self.exact
    }
}

/// The data of the reply that names the context, with its identifier once it is chosen and 0 in a list.
pub(crate) fn context_reply(is_chosen: bool) -> Vec<u8> {
    let id = if is_chosen { wire::BASE_ALLOCATION_ID } else { 0 };
    [&id.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(count: u32, queries: &[&str]) -> Vec<u8> {
        let mut data = vec![0, 0, 0, 1, b'x'];
        data.extend(count.to_be_bytes());
        for query in queries {
            data.extend((query.len() as u32).to_be_bytes());
            data.extend(query.bytes());
        }
        data
    }

    fn answers(queries: &[&str]) -> (bool, bool) {
        let data = query(queries.len() as u32, queries);
        let query = ContextQuery::read(&data).unwrap();
        assert_eq!(query.export, b"x");
        (query.lists(), query.selects())
    }

    #[test]
    fn contexts_are_matched_exactly_or_by_their_namespace() {
        assert_eq!(answers(&[]), (true, false), "no query: all are listed, none is set");
        assert_eq!(answers(&["qemu:a", "base:allocation"]), (true, true));
        assert_eq!(answers(&["base:"]), (true, false));
        assert_eq!(answers(&["base:allocations", "", "other"]), (false, false));
    }

    #[test]
    fn malformed_queries_are_none() {
        let good = query(1, &["base:"]);
        assert!(ContextQuery::read(&good).is_some());
        for len in 0..good.len() {
            assert!(ContextQuery::read(&good[..len]).is_none(), "{len} bytes of it");
        }
        assert!(ContextQuery::read(&[&good[..], &[0]].concat()).is_none());
        assert!(ContextQuery::read(&query(u32::MAX, &["base:"])).is_none());
    }
}
