// Package hpack compresses and decompresses HTTP/2 field blocks (RFC 7541).
//
//   - A Decoder copies nothing it need not: fields alias the block, the dynamic
//     table or a bounded arena, and are valid until its next call.
//   - A block whose fields exceed the limit still leaves the tables right, so
//     that one stream can be refused and the connection lives.
//   - An Encoder indexes a field only when it has seen it twice, never uses
//     Huffman coding (it costs more than the bytes it saves inside a node or
//     a data centre), and never indexes credentials or cookies.
//   - Nothing is allocated once the tables are warm.
//
// It knows no frame, no stream and no meaning of a field: who needs one to be
// judged gives the Decoder a Marker.
package hpack

import "errors"

// MaxTable is the largest dynamic table, in octets as RFC 7541 4.1 counts
// them, that either side of this package keeps. It is the protocol's default,
// so no SETTINGS_HEADER_TABLE_SIZE need be sent.
const MaxTable = 4096

// overhead is what RFC 7541 4.1 adds to the name and value of each field.
const overhead = 32

// Errors of Decoder.Decode. ErrTooLarge leaves the Decoder usable; after the
// others the connection is lost.
var (
	ErrTooLarge = errors.New("hpack: fields exceed the limit")
	ErrBomb     = errors.New("hpack: block expands to more than 16 times the limit")
	ErrInvalid  = errors.New("hpack: malformed field block")
)

// Field is one decoded field. The slices must not be written to. Mark is what
// the Decoder's Marker said of it.
type Field struct {
	Name, Value []byte
	Mark        uint8
}

// A Marker classifies a field. It is called once when a field arrives as a
// literal, not again when the peer refers to it by index, and must not keep
// the slices.
type Marker func(name, value []byte) uint8

// entry of a dynamic table; off is absolute (see table).
type entry struct {
	off    uint32
	nl, vl uint16
	mark   uint8
}

// table is a dynamic table (RFC 7541 2.3.2). The bytes of its entries lie one
// after the other in buf; those of evicted entries stay until compact, so that
// slices handed out remain true.
type table struct {
	buf  []byte
	base uint32 // absolute offset of buf[0]
	head uint32 // entries ever added
	n    int    // entries
	size int    // octets, RFC 7541 4.1
	max  int
	ent  [MaxTable / overhead]entry // ring: the entry number i (from 0) is ent[i%len]
}

// held is how many bytes of memory the entries take.
func (t *table) held() int { return cap(t.buf) }

// at returns entry i, 1 being the newest.
func (t *table) at(i int) *entry { return &t.ent[(t.head-uint32(i))%uint32(len(t.ent))] }

func (t *table) name(e *entry) []byte {
	o := int(e.off - t.base)
	return t.buf[o : o+int(e.nl) : o+int(e.nl)]
}

func (t *table) value(e *entry) []byte {
	o := int(e.off-t.base) + int(e.nl)
	return t.buf[o : o+int(e.vl) : o+int(e.vl)]
}

func (t *table) setMax(n int) {
	t.max = n
	t.evict(0)
}

func (t *table) evict(need int) {
	for t.n > 0 && t.size+need > t.max {
		e := t.at(t.n)
		t.size -= int(e.nl) + int(e.vl) + overhead
		t.n--
	}
}

// add puts a field in front; one that is larger than the table empties it
// (RFC 7541 4.4) and false is returned. name may alias the table.
func (t *table) add(name, value []byte, mark uint8) bool {
	size := len(name) + len(value) + overhead
	t.evict(size)
	if size > t.max {
		return false
	}
	e := &t.ent[t.head%uint32(len(t.ent))]
	*e = entry{t.base + uint32(len(t.buf)), uint16(len(name)), uint16(len(value)), mark}
	t.buf = append(append(t.buf, name...), value...)
	t.head++
	t.n++
	t.size += size
	return true
}

// compact drops the bytes of evicted entries once they are many. It moves what
// the table holds: slices handed out before are void.
func (t *table) compact() {
	live := t.size - t.n*overhead
	dead := len(t.buf) - live
	if dead <= MaxTable {
		return
	}
	if cap(t.buf) > 4*MaxTable { // one huge block made it grow
		t.buf = append(make([]byte, 0, 2*MaxTable), t.buf[dead:]...)
	} else {
		t.buf = t.buf[:copy(t.buf, t.buf[dead:])]
	}
	t.base += uint32(dead)
}

// Indexes of the static table (RFC 7541 appendix A) that HTTP/2 needs by name:
// as the name of a field, or with AppendIndexed as the whole of it.
const (
	Authority    = 1
	MethodGET    = 2
	MethodPOST   = 3
	PathRoot     = 4
	SchemeHTTP   = 6
	SchemeHTTPS  = 7
	Status200    = 8
	Status204    = 9
	Status206    = 10
	Status304    = 11
	Status400    = 12
	Status404    = 13
	Status500    = 14
	staticLen    = 61
	authz        = 23
	cookie       = 32
	proxyAuthz   = 49
	setCookie    = 55
	acceptEncGzp = 16 // the only regular field with a value in the static table
)

// never has a bit for each static name whose values stay out of the dynamic table (RFC 7541 7.1.3).
const never = 1<<authz | 1<<cookie | 1<<proxyAuthz | 1<<setCookie

// static is RFC 7541 appendix A.
var static = [staticLen + 1]Field{}

var staticText = [staticLen + 1][2]string{{},
	{":authority", ""}, {":method", "GET"}, {":method", "POST"}, {":path", "/"}, {":path", "/index.html"},
	{":scheme", "http"}, {":scheme", "https"}, {":status", "200"}, {":status", "204"}, {":status", "206"},
	{":status", "304"}, {":status", "400"}, {":status", "404"}, {":status", "500"}, {"accept-charset", ""},
	{"accept-encoding", "gzip, deflate"}, {"accept-language", ""}, {"accept-ranges", ""}, {"accept", ""},
	{"access-control-allow-origin", ""}, {"age", ""}, {"allow", ""}, {"authorization", ""}, {"cache-control", ""},
	{"content-disposition", ""}, {"content-encoding", ""}, {"content-language", ""}, {"content-length", ""},
	{"content-location", ""}, {"content-range", ""}, {"content-type", ""}, {"cookie", ""}, {"date", ""},
	{"etag", ""}, {"expect", ""}, {"expires", ""}, {"from", ""}, {"host", ""}, {"if-match", ""},
	{"if-modified-since", ""}, {"if-none-match", ""}, {"if-range", ""}, {"if-unmodified-since", ""},
	{"last-modified", ""}, {"link", ""}, {"location", ""}, {"max-forwards", ""}, {"proxy-authenticate", ""},
	{"proxy-authorization", ""}, {"range", ""}, {"referer", ""}, {"refresh", ""}, {"retry-after", ""},
	{"server", ""}, {"set-cookie", ""}, {"strict-transport-security", ""}, {"transfer-encoding", ""},
	{"user-agent", ""}, {"vary", ""}, {"via", ""}, {"www-authenticate", ""},
}

var (
	staticHash [staticLen + 1]uint64 // hash of the name
	staticSlot [256]uint8            // open addressing by staticHash
)

func init() {
	for i := 1; i <= staticLen; i++ {
		static[i] = Field{Name: []byte(staticText[i][0]), Value: []byte(staticText[i][1])}
		h := hash(static[i].Name, 0)
		staticHash[i] = h
		if i > 1 && staticText[i][0] == staticText[i-1][0] {
			continue // the first index of a name stands for it
		}
		s := uint8(h)
		for staticSlot[s] != 0 {
			s++
		}
		staticSlot[s] = uint8(i)
	}
}

// staticName returns the static index of a name, or 0.
func staticName(name []byte, h uint64) int {
	for s := uint8(h); ; s++ {
		i := staticSlot[s]
		if i == 0 || staticHash[i] == h && string(static[i].Name) == string(name) {
			return int(i)
		}
	}
}

// appendInt appends an integer with a prefix of that many bits (RFC 7541 5.1).
func appendInt(dst []byte, first byte, bits uint, v int) []byte {
	m := 1<<bits - 1
	if v < m {
		return append(dst, first|byte(v))
	}
	dst = append(dst, first|byte(m))
	for v -= m; v >= 0x80; v >>= 7 {
		dst = append(dst, byte(v)|0x80)
	}
	return append(dst, byte(v))
}

// maxInt bounds the integers a peer may send; no length or index can be as large.
const maxInt = 1 << 24

// readInt reads an integer with a prefix of that many bits and returns what
// follows it.
func readInt(p []byte, bits uint) (v int, rest []byte, ok bool) {
	if len(p) == 0 {
		return 0, nil, false
	}
	m := 1<<bits - 1
	v = int(p[0]) & m
	if v < m {
		return v, p[1:], true
	}
	for i := 1; i < len(p); i++ {
		if i > 4 {
			return 0, nil, false
		}
		v += int(p[i]&0x7f) << (7 * (i - 1))
		if p[i] < 0x80 {
			return v, p[i+1:], v <= maxInt
		}
	}
	return 0, nil, false
}
