package ambiguity

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// canonical is a request as a back end understood it, on one line: method, authority,
// target and body. The service's name is "app", and its port is left out.
func canonical(method, authority, target string, body []byte) string {
	var b string
	body = ownPort.ReplaceAll(body, []byte(":8083"))
	switch {
	case len(body) > 64:
		b = fmt.Sprintf(" %d bytes, sha256 %.4x", len(body), sha256.Sum256(body))
	case len(body) > 0:
		b = " " + strconv.Quote(string(body))
	}
	if len(target) > 100 {
		target = fmt.Sprintf("%s... (%d bytes)", target[:20], len(target))
	}
	return printable(fmt.Sprintf("%s %s %s", method, short(cmp.Or(authority, "-")), target)) + b
}

var ownName = regexp.MustCompile(`(?i)app\.shop\.aether\.internal(\.?)(:808\d)?`)

var ownPort = regexp.MustCompile(`:808\d`)

func short(s string) string { return ownName.ReplaceAllString(s, "app$1") }

// printable writes bytes that do not print as Go would.
func printable(s string) string {
	q := strconv.QuoteToASCII(s)
	return strings.NewReplacer(`\"`, `"`, `\\`, `\`).Replace(q[1 : len(q)-1])
}

// withPort is a request for another back end.
func withPort(b []byte, port string) string {
	return string(bytes.ReplaceAll(b, []byte(":8083"), []byte(":"+port)))
}

// recorder is a back end that writes down what it is sent and answers 200 to each
// request. It reads strictly, on its own: what it had to guess at, it says.
type recorder struct {
	mu   sync.Mutex
	seen []string
}

// take returns what was recorded since the last call. Requests whose answer has
// reached the client are among it.
func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.seen
	r.seen = nil
	return s
}

func (r *recorder) add(line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = append(r.seen, line)
}

func (r *recorder) serve(c *net.TCPConn) {
	br := bufio.NewReader(c)
	for {
		line, err := r.request(br)
		if err != nil { // a request that is not whole was not asked
			return
		}
		r.add(line)
		if _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"); err != nil {
			return
		}
	}
}

// maxHead bounds what a proxy may send as a head, in bytes.
const maxHead = 256 << 10

// request reads one request. What two readers could read in two ways is marked with "!".
func (r *recorder) request(br *bufio.Reader) (string, error) {
	var marks []string
	mark := func(m string) {
		if !slices.Contains(marks, "!"+m) {
			marks = append(marks, "!"+m)
		}
	}
	size := 0
	next := func() (string, error) {
		s, err := br.ReadString('\n')
		if size += len(s); size > maxHead {
			return "", errors.New("the head does not end")
		}
		if err != nil {
			return "", err
		}
		l, ok := strings.CutSuffix(s, "\r\n")
		if !ok {
			l = strings.TrimSuffix(s, "\n")
			mark("LF")
		}
		if strings.ContainsAny(l, "\r\x00") {
			mark("control character")
		}
		return l, nil
	}
	first, err := next()
	if err != nil {
		return "", err
	}
	method, rest, ok1 := strings.Cut(first, " ")
	target, version, ok2 := strings.Cut(rest, " ")
	if !ok1 || !ok2 || version != "HTTP/1.1" && version != "HTTP/1.0" {
		mark("request line " + strconv.Quote(first))
	}
	f := map[string][]string{}
	for {
		l, err := next()
		if err != nil {
			return "", err
		}
		if l == "" {
			break
		}
		name, value, ok := strings.Cut(l, ":")
		if !ok || name == "" || strings.ContainsAny(name, " \t") {
			mark("field " + strconv.Quote(l))
		}
		k := strings.ToLower(strings.Trim(name, " \t"))
		f[k] = append(f[k], strings.Trim(value, " \t"))
	}
	if len(f["host"]) > 1 {
		mark("several Hosts")
	}
	length, coding := f["content-length"], f["transfer-encoding"]
	if len(length)+len(coding) > 1 {
		mark("several framings")
	}
	var body []byte
	switch {
	case len(coding) > 0:
		if !strings.EqualFold(coding[0], "chunked") {
			mark("coding " + strconv.Quote(coding[0]))
		}
		for {
			l, err := next()
			if err != nil {
				return "", err
			}
			digits, ext, _ := strings.Cut(l, ";")
			n, err := strconv.ParseUint(digits, 16, 31)
			if err != nil {
				mark("chunk size " + strconv.Quote(digits))
				return "", err
			}
			if ext != "" {
				mark("extension")
			}
			if n == 0 {
				break
			}
			b := make([]byte, n+2)
			if _, err := io.ReadFull(br, b); err != nil {
				return "", err
			}
			if string(b[n:]) != "\r\n" {
				mark("end of a chunk")
			}
			body = append(body, b[:n]...)
			size = 0
		}
		for {
			l, err := next()
			if err != nil {
				return "", err
			}
			if l == "" {
				break
			}
		}
	case len(length) > 0:
		n, err := strconv.ParseUint(length[0], 10, 31)
		if err != nil || strconv.FormatUint(n, 10) != length[0] {
			mark("length " + strconv.Quote(length[0]))
		}
		if err != nil {
			return "", err
		}
		body = make([]byte, n)
		if _, err := io.ReadFull(br, body); err != nil {
			return "", err
		}
	}
	line := canonical(method, strings.Join(f["host"], "+"), target, body)
	return strings.Join(append([]string{line}, marks...), " "), nil
}

// ServeHTTP records what net/http understood.
func (r *recorder) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	body, err := io.ReadAll(q.Body)
	if err != nil {
		return
	}
	r.add(canonical(q.Method, q.Host, q.RequestURI, body))
}
