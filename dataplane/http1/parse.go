package http1

import (
	"bytes"
	"cmp"
	"strconv"

	"aether/dataplane/httpmsg"
)

// Parser finds and parses the heads of one direction of one connection. Its
// zero value is ready. Between heads it holds nothing.
type Parser struct {
	Limits Limits
	// Where the search for the end of the present head stands.
	phase  phase
	blank  uint8  // empty lines that EmptyLines has taken from the stream
	fields int32  // field lines seen
	pos    uint32 // bytes looked at
	start  uint32 // of the method, after the empty lines
	line   uint32 // start of the present line
	sp1    uint32 // the space after the method
	sp2    uint32 // the space after the target
	at     uint32 // with a fault: the byte that it is about
}

type phase uint8

const (
	atStart phase = iota
	inMethod
	inTarget
	inVersion
	inFields
)

// Request parses the head of a request from the start of b. n is the number of
// bytes of b that the head takes: 0 without an error means that b does not hold
// the whole head yet; call again with the same bytes and more after them (they
// may have moved). h is only written with n > 0 or an error, and is of no use
// with an error.
//
// Once the head is whole its bytes may be rewritten in place: field names and
// connection options become lower case. All slices in h alias b or constants.
//
// The body is to be read with f and h.Length. An error is an *Error.
func (p *Parser) Request(b []byte, h *httpmsg.Head) (n int, f Framing, err error) {
	n, bad := p.scan(b, false)
	if n > 0 {
		f, bad = p.request(b[:n], h)
	}
	return p.finish(b, n, f, bad, false)
}

// Response parses the head of a response from the start of b, like Request.
// headRequest: it answers a HEAD request, and so has no body. Interim
// responses (1xx) are heads of their own: the final one follows.
func (p *Parser) Response(b []byte, h *httpmsg.Head, headRequest bool) (n int, f Framing, err error) {
	n, bad := p.scan(b, true)
	if n > 0 {
		f, bad = p.response(b[:n], h, headRequest)
	}
	return p.finish(b, n, f, bad, true)
}

// EmptyLines takes empty lines that stand before a request (RFC 9112 2.2) from the stream, where b, of which
// Request found that it holds no whole head, is nothing else. It returns their bytes: those may be
// dropped, and need not be given to Request again. The end of the head forgets them.
func (p *Parser) EmptyLines(b []byte) int {
	n := 0
	for n+1 < len(b) && b[n] == '\r' && b[n+1] == '\n' {
		n += 2
	}
	if n < len(b) || n/2+int(p.blank) > maxEmptyLines {
		return 0
	}
	p.blank += uint8(n / 2)
	return n
}

// finish readies p for the next head, unless this one goes on.
func (p *Parser) finish(b []byte, n int, f Framing, bad *fault, response bool) (int, Framing, error) {
	if n == 0 && bad == nil {
		return 0, None, nil
	}
	var err error
	if bad != nil {
		n, f, err = 0, None, bad.in(response, p.where(b, bad))
	}
	*p = Parser{Limits: p.Limits}
	return n, f, err
}

// where names what the reason of bad leaves open: the limit, or the byte and its field.
func (p *Parser) where(b []byte, bad *fault) string {
	switch bad {
	case longHead:
		return atMost(cmp.Or(p.Limits.MaxHead, defaultMaxHead), "bytes")
	case manyFields:
		return atMost(cmp.Or(p.Limits.MaxFields, defaultMaxFields), "")
	case longTarget:
		return atMost(cmp.Or(p.Limits.MaxTarget, defaultMaxTarget), "bytes")
	case badLineEnd, badCR, badMethod, badTarget, badVersion, otherVersion, badStatusLine, badReason, badName, folded, badValue:
		return bad.place(b[p.start:], int(p.at-p.start), true)
	}
	return ""
}

func atMost(n int, unit string) string {
	s := "at most " + strconv.Itoa(n)
	if unit != "" {
		s += " " + unit
	}
	return s
}

// bad makes the byte at b[at] the one that f is about.
func (p *Parser) bad(f *fault, at int) *fault {
	p.at = uint32(at)
	return f
}

// scan looks for the end of the head in b, going on from where it stopped, and
// returns the head's size. It judges the first line and the line ends on the
// way, strictly from left to right, so that garbage is refused as soon as it is
// seen and the answer is the same however the bytes were cut. It writes nothing.
func (p *Parser) scan(b []byte, response bool) (int, *fault) {
	most := cmp.Or(p.Limits.MaxHead, defaultMaxHead)
	full := len(b) >= most
	b = b[:min(len(b), most)]
	if p.phase != inFields {
		var bad *fault
		if response {
			bad = p.statusLine(b)
		} else {
			bad = p.requestLine(b)
		}
		if bad != nil {
			return 0, bad
		}
	}
	if p.phase == inFields {
		if n, bad := p.lines(b); n > 0 || bad != nil {
			return n, bad
		}
	}
	if full {
		return 0, longHead
	}
	return 0, nil
}

// requestLine judges as much of the request line as b holds.
func (p *Parser) requestLine(b []byte) *fault {
	i := int(p.pos)
	if p.phase == atStart {
		for n := p.blank; i < len(b) && b[i] == '\r' && n < maxEmptyLines; n++ {
			if i+1 == len(b) {
				return nil
			}
			if b[i+1] != '\n' {
				return p.bad(badCR, i+1)
			}
			i += 2
		}
		if i == len(b) {
			return nil
		}
		p.phase, p.start = inMethod, uint32(i)
	}
	if p.phase == inMethod {
		for ; ; i++ {
			if i == len(b) {
				p.pos = uint32(i)
				return nil
			}
			c := b[i]
			if c == ' ' && i > int(p.start) {
				break
			}
			if httpmsg.Lower[c] == 0 {
				return p.bad(badMethod, i)
			}
			if i-int(p.start) == maxMethod {
				return longMethod
			}
		}
		p.phase, p.sp1 = inTarget, uint32(i)
		i++
	}
	if p.phase == inTarget {
		first := int(p.sp1) + 1
		most := first + cmp.Or(p.Limits.MaxTarget, defaultMaxTarget)
		for ; ; i++ {
			if i == len(b) {
				p.pos = uint32(i)
				return nil
			}
			c := b[i]
			if notTarget[c] {
				if c == ' ' && i > first {
					break
				}
				return p.bad(badTarget, i)
			}
			if i == most {
				return longTarget
			}
		}
		p.phase, p.sp2 = inVersion, uint32(i)
	}
	const size = len("HTTP/1.1\r\n")
	v := b[p.sp2+1:]
	v = v[:min(len(v), size)]
	if len(v) < size {
		p.pos = p.sp2 + 1
		if bytes.IndexByte(v, '\n') >= 0 {
			return p.bad(badVersion, p.noVersion(v))
		}
		return nil
	}
	if string(v[:7]) != "HTTP/1." || v[7] != '1' && v[7] != '0' || v[8] != '\r' || v[9] != '\n' {
		if string(v[:5]) == "HTTP/" && isDigit(v[5]) && v[6] == '.' && isDigit(v[7]) && v[8] == '\r' && v[9] == '\n' {
			return p.bad(otherVersion, p.noVersion(v))
		}
		return p.bad(badVersion, p.noVersion(v))
	}
	p.phase, p.pos = inFields, p.sp2+1+uint32(size)
	p.line = p.pos
	return nil
}

// noVersion is the index of the first byte of v, which follows the target, that makes it no version of ours.
func (p *Parser) noVersion(v []byte) int {
	const want = "HTTP/1.v\r\n" // v: 0 or 1
	i := 0
	for i < len(v)-1 && (v[i] == want[i] || want[i] == 'v' && (v[i] == '0' || v[i] == '1')) {
		i++
	}
	return int(p.sp2) + 1 + i
}

// statusLine judges the status line up to the code; lines sees to its end.
func (p *Parser) statusLine(b []byte) *fault {
	const form = "HTTP/1.v sdde" // v: version, s: first digit, d: digit, e: end of the code
	for i := range min(len(b), len(form)) {
		ok, c := false, b[i]
		switch form[i] {
		case 'v':
			ok = c == '0' || c == '1'
		case 's':
			ok = c >= '1' && c <= '9'
		case 'd':
			ok = isDigit(c)
		case 'e':
			ok = c == ' ' || c == '\r'
		default:
			ok = c == form[i]
		}
		if !ok {
			return p.bad(badStatusLine, i)
		}
	}
	if len(b) >= len(form) {
		p.phase, p.pos, p.fields = inFields, uint32(len(form))-1, -1 // the status line is none
	}
	return nil
}

// lines goes from line end to line end, up to the empty line.
func (p *Parser) lines(b []byte) (int, *fault) {
	pos, line := int(p.pos), int(p.line)
	most := int32(cmp.Or(p.Limits.MaxFields, defaultMaxFields))
	for {
		if line+1 < len(b) && b[line] == '\r' {
			if b[line+1] != '\n' {
				return 0, p.bad(badCR, line+1)
			}
			return line + 2, nil
		}
		i := bytes.IndexByte(b[pos:], '\n')
		if i < 0 {
			p.pos, p.line = uint32(len(b)), uint32(line)
			return 0, nil
		}
		if pos += i; b[pos-1] != '\r' {
			return 0, p.bad(badLineEnd, pos)
		}
		if p.fields++; p.fields > most {
			return 0, manyFields
		}
		pos++
		line = pos
	}
}

// request parses the whole head b, whose lines scan has found.
func (p *Parser) request(b []byte, h *httpmsg.Head) (Framing, *fault) {
	h.Reset()
	h.Method = b[p.start:p.sp1:p.sp1]
	target := b[p.sp1+1 : p.sp2 : p.sp2]
	h.Minor = b[p.sp2+8] - '0'
	var s section
	if bad := s.parse(b, int(p.sp2)+11, h); bad != nil {
		return None, p.bad(bad, s.at)
	}
	switch {
	case s.hosts > 1:
		return None, manyHosts
	case s.hosts == 0 && h.Minor != 0:
		return None, noHost
	}
	host, _, ok := httpmsg.Authority(s.host)
	if !ok {
		return None, badHost
	}
	h.Authority, h.Scheme = host, schemeHTTP
	if target[0] == '/' {
		if string(h.Method) == "CONNECT" {
			return None, badForm
		}
		h.Path = target
	} else if bad := otherForm(target, h); bad != nil {
		return None, bad
	}
	if h.Minor == 0 {
		if s.expect {
			h.Del("expect")
		}
	} else {
		h.Expect = s.continues
		if s.upgradeOption && s.upgrades == 1 && len(s.upgrade) > 0 {
			h.Upgrade = s.upgrade
		}
	}
	h.Close = s.close || h.Minor == 0 && !s.keepAlive
	switch {
	case s.chunked:
		h.Length = httpmsg.Unknown
		return Chunked, nil
	case s.hasLength:
		h.Length = s.length
		return Length, nil
	}
	return None, nil
}

// The schemes and paths that no request spells out. Never written to.
var (
	schemeHTTP  = []byte("http")
	schemeHTTPS = []byte("https")
	pathRoot    = []byte("/")
	pathServer  = []byte("*")
	trailers    = []byte("trailers")
)

// otherForm takes the authority and path from a target that does not begin
// with a slash (RFC 9112 3.2.2 to 3.2.4). Host has been judged already and gives way.
func otherForm(target []byte, h *httpmsg.Head) *fault {
	method := string(h.Method)
	if method == "CONNECT" {
		a, port, ok := httpmsg.Authority(target)
		if !ok || !port {
			return badAuthority
		}
		h.Authority, h.Path = a, nil
		return nil
	}
	if len(target) == 1 && target[0] == '*' {
		if method != "OPTIONS" {
			return badForm
		}
		h.Path = target
		return nil
	}
	from := 0
	switch {
	case len(target) > 7 && equalFold(target[:7], "http://"):
		from = 7
	case len(target) > 8 && equalFold(target[:8], "https://"):
		from, h.Scheme = 8, schemeHTTPS
	default:
		return badForm
	}
	to := from
	for to < len(target) && target[to] != '/' && target[to] != '?' {
		to++
	}
	a, _, ok := httpmsg.Authority(target[from:to:to])
	if !ok || len(a) == 0 {
		return badAuthority
	}
	h.Authority = a
	switch {
	case to == len(target) && method == "OPTIONS":
		h.Path = pathServer // RFC 9112 3.2.4
	case to == len(target):
		h.Path = pathRoot
	case target[to] == '?':
		// "http://a?q" is asked for as "/?q": one slash of "://" is of no use
		// any more, so the authority moves over it and leaves room for another.
		copy(target[from-1:], target[from:to])
		target[to-1] = '/'
		h.Authority = target[from-1 : from-1+len(a) : from-1+len(a)]
		h.Path = target[to-1:]
	default:
		h.Path = target[to:]
	}
	return nil
}

// response parses the whole head b, whose lines scan has found.
func (p *Parser) response(b []byte, h *httpmsg.Head, headRequest bool) (Framing, *fault) {
	h.Reset()
	h.Minor = b[7] - '0'
	h.Status = int(b[9]-'0')*100 + int(b[10]-'0')*10 + int(b[11]-'0')
	end := control(b, 12)
	if b[end] != '\r' || b[end+1] != '\n' {
		return None, p.bad(badReason, end)
	}
	s := section{response: true}
	if bad := s.parse(b, end+2, h); bad != nil {
		return None, p.bad(bad, s.at)
	}
	h.Close = s.close || h.Minor == 0 && !s.keepAlive
	if h.Status == 101 && h.Minor != 0 && s.upgrades == 1 && len(s.upgrade) > 0 {
		h.Upgrade = s.upgrade
	}
	switch {
	case headRequest || bodiless(h.Status):
		if s.hasLength && (h.Status < 200 || h.Status == 204) {
			h.Del("content-length") // 1xx and 204 have none (RFC 9110 8.6)
		}
		return None, nil
	case s.chunked:
		h.Length = httpmsg.Unknown
		return Chunked, nil
	case s.hasLength:
		h.Length = s.length
		return Length, nil
	}
	h.Length, h.Close = httpmsg.Unknown, true
	return ToClose, nil
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }
