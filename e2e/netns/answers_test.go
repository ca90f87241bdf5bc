package netns

import (
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"
)

// TestRefusedAnswersAreNamed: what is told of an application's answer that is refused names the field, the byte or the
// limit: in the client's body, in the failure log and in `why` of the node that refused it.
func TestRefusedAnswersAreNamed(t *testing.T) {
	ctx := within(t, time.Minute)
	i := 0
	for _, tt := range []struct {
		name, answer string
		want         string // of the fault
		begun        bool   // the client has the head already
	}{ // nine of one cause: the log has room for ten a second
		{"chunked twice", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "malformed Transfer-Encoding", false},
		{"101 fields", "HTTP/1.1 200 OK\r\n" + strings.Repeat("x-a: b\r\n", 101) + "content-length: 2\r\n\r\nok", "too many field lines.*at most 100", false},
		{"a space in a name", "HTTP/1.1 200 OK\r\nX A: 1\r\nContent-Length: 2\r\n\r\nok", "malformed field name.*'x a', byte 0x20", false},
		{"an escape in a name", "HTTP/1.1 200 OK\r\nX\x1b[31m: 1\r\nContent-Length: 2\r\n\r\nok", `malformed field name.*'x\\x1b\[31m', byte 0x1b`, false},
		{"a control in a value", "HTTP/1.1 200 OK\r\nX-A: secret\x07\r\nContent-Length: 2\r\n\r\nok", "control character in a field value.*'x-a', byte 0x07", false},
		{"lines of bare LF", "HTTP/1.1 200 OK\nContent-Length: 2\n\nok", "line feed without carriage return.*in the first line", false},
		{"a folded field", "HTTP/1.1 200 OK\r\nX-A: 1\r\n 2\r\nContent-Length: 2\r\n\r\nok", "folded field.*'x-a', byte 0x20", false},
		{"two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", "several Content-Length", false},
		{"space after the size", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2  \r\nok\r\n0\r\n\r\n", "malformed chunk size.*byte 0x20", true},
		{"a body that is cut", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nok", "before the body had the length of its Content-Length", true},
		{"chunks that are cut", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "before the last chunk", true},
	} {
		i++
		id := fmt.Sprintf("refused-answer-%d", i)
		path := "/" + id
		w.raw.m.Store(path, func(r rawRequest) {
			io.WriteString(r.c, tt.answer)
			_ = r.c.CloseWrite()
			_, _ = io.Copy(io.Discard, r.c) // until the proxy has closed it: a reset would take the answer away
			r.c.Close()
		})
		c := dial(t, ctx, w.Pod("web"), vip(appVIP, portRaw))
		say(t, c, fmt.Sprintf("GET %s HTTP/1.1\r\nHost: %s:%d\r\nX-Request-Id: %s\r\nConnection: close\r\n\r\n", path, appName, portRaw, id))
		got, _ := io.ReadAll(c)
		c.Close()
		w.raw.m.Delete(path)
		is := regexp.MustCompile(tt.want)
		head, body, _ := strings.Cut(string(got), "\r\n\r\n")
		if !tt.begun && (!strings.HasPrefix(head, "HTTP/1.1 502 ") || !is.MatchString(body) || strings.Contains(body, "secret")) {
			t.Errorf("%s: the client reads %q", tt.name, got)
		}
		line := failureLine(t, ctx, 1, id)
		fault, _ := line["fault"].(string)
		if !is.MatchString(fault) || strings.Contains(fault, "secret") || len(fault) > 400 {
			t.Errorf("%s: logged as %q: %v", tt.name, fault, line)
		}
		for _, b := range []byte(fault) {
			if b < ' ' || b > '~' {
				t.Errorf("%s: byte %#x in %q", tt.name, b, fault)
			}
		}
		if cause := line["cause"]; cause != "protocol" && cause != "closed" {
			t.Errorf("%s: cause %v", tt.name, cause)
		}
		why, err := w.Admin(ctx, 1, "/why?bad=1&n=20")
		if err != nil || !strings.Contains(string(why), fault) {
			t.Errorf("%s: why does not show %q: %v\n%s", tt.name, fault, err, why)
		}
	}
}
