package model

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"aether/dataplane/httpmsg"
)

var (
	classNames  = [...]string{"none", "http", "tcp", "udp"}
	appNames    = [...]string{"http1", "h2c"}
	healthNames = [...]string{"unspecified", "healthy", "unhealthy", "draining"}
	sniffNames  = [...]string{"", "http10", "http1", "h2c", "tls", "opaque", "silent", "malformed"}
	dirNames    = [...]string{"invalid", "captured", "proxy", "inbound"}
	routeNames  = [...]string{"route", "GRPCRoute", "HTTPRoute", "TLSRoute", "TCPRoute"}
	meanNames   = [...]string{"Aether", "GatewayAPI"}
	nearNames   = [...]string{"mTLS", "inProcess"}
)

func nameOf(names []string, i uint8) string {
	if int(i) < len(names) {
		return names[i]
	}
	return "invalid"
}

// String is "http", "tcp", "udp", or "none".
func (c Class) String() string { return nameOf(classNames[:], uint8(c)) }

// String is "http1" or "h2c".
func (a AppCodec) String() string { return nameOf(appNames[:], uint8(a)) }

// String is the kind's name in the Gateway API.
func (k RouteKind) String() string { return nameOf(routeNames[:], uint8(k)) }

// String is "Aether" or "GatewayAPI".
func (s Semantics) String() string { return nameOf(meanNames[:], uint8(s)) }

// String is "mTLS" or "inProcess".
func (s SameNode) String() string { return nameOf(nearNames[:], uint8(s)) }

// String is the health's name in lower case.
func (h Health) String() string { return nameOf(healthNames[:], uint8(h)) }

// String is the word a flow's text has for it; "" for SniffNone.
func (s Sniff) String() string { return nameOf(sniffNames[:], uint8(s)) }

// String is "captured", "proxy" or "inbound".
func (d Direction) String() string { return nameOf(dirNames[:], uint8(d)) }

// String is the flow's text form:
//
//	shop/web > 10.96.0.10:8080 http1 host=cart:8080
//	shop/web@c0ffee > proxy http1 host=cart:8080
//	shop/cart < 8080 h2c peer=spiffe://td/ns/shop/sa/web
//
// Namespace, slash, ServiceAccount, and after an @ the container, if known;
// the direction and the destination; the sniff result; host and peer; "waited" where
// rows are not waited for any more. A value with a space or a quote in it is quoted as Go quotes strings. ParseFlow reads
// it back, given that the direction is one of the three.
func (f Flow) String() string {
	b := make([]byte, 0, 96)
	if who := f.Namespace + "/" + f.Workload; strings.Contains(who, "@") {
		b = strconv.AppendQuote(b, who)
	} else {
		b = appendWord(b, who)
	}
	if f.Container != "" {
		b = appendWord(append(b, '@'), f.Container)
	}
	switch f.Dir {
	case Captured:
		b = append(b, " > "...)
		b = f.Dst.AppendTo(b)
	case Proxy:
		b = append(b, " > proxy"...)
	case Inbound:
		b = append(b, " < "...)
		if f.Dst.Addr().IsValid() {
			b = f.Dst.AppendTo(b)
		} else {
			b = strconv.AppendUint(b, uint64(f.Dst.Port()), 10)
		}
	default:
		b = append(b, " ? "...)
		b = f.Dst.AppendTo(b)
	}
	if f.Sniff != SniffNone {
		b = append(append(b, ' '), f.Sniff.String()...)
	}
	if f.Host != "" {
		b = appendWord(append(b, " host="...), f.Host)
	}
	if f.Peer != "" {
		b = appendWord(append(b, " peer="...), f.Peer)
	}
	if f.Waited {
		b = append(b, " waited"...)
	}
	return string(b)
}

const flowForm = `the form is: namespace/account[@container] > address:port|proxy [sniff] [host=H] [waited], or namespace/account < port [sniff] [peer=ID]`

// ParseFlow reads what Flow.String writes. The destination of a Proxy flow and
// the address of an Inbound one are not part of the text.
func ParseFlow(text string) (Flow, error) {
	fail := func(format string, args ...any) (Flow, error) {
		return Flow{}, fmt.Errorf("flow %q: %s; %s", text, fmt.Sprintf(format, args...), flowForm)
	}
	words, err := splitWords(text)
	if err != nil {
		return fail("%v", err)
	}
	if len(words) < 3 {
		return fail("%d words where at least 3 are needed", len(words))
	}
	var f Flow
	who, container, at, err := cutUnquoted(words[0], '@')
	if err != nil {
		return fail("%v", err)
	}
	if at && container == "" {
		return fail("nothing after the @")
	}
	f.Container = container
	ns, account, ok := strings.Cut(who, "/")
	if !ok || account == "" || strings.Contains(account, "/") {
		return fail("%q is not namespace/account", who)
	}
	f.Namespace, f.Workload = ns, account
	switch words[1] {
	case ">":
		if words[2] == "proxy" {
			f.Dir = Proxy
			break
		}
		f.Dir = Captured
		a, err := netip.ParseAddrPort(words[2])
		if err != nil {
			return fail("destination %q is neither an address with a port nor the word proxy", words[2])
		}
		f.Dst = OrigDst{a}
	case "<":
		f.Dir = Inbound
		if p, err := strconv.ParseUint(words[2], 10, 16); err == nil {
			f.Dst = OrigDst{netip.AddrPortFrom(netip.Addr{}, uint16(p))}
		} else if a, err := netip.ParseAddrPort(words[2]); err == nil {
			f.Dst = OrigDst{a}
		} else {
			return fail("destination %q is no port number", words[2])
		}
	default:
		return fail("direction %q is neither > nor <", words[1])
	}
	for _, w := range words[3:] {
		key, value, ok := strings.Cut(w, "=")
		if ok {
			if value, err = unword(value); err != nil {
				return fail("%v", err)
			}
		}
		switch {
		case ok && value == "":
			return fail("nothing after %s=", key)
		case ok && key == "host" && f.Host == "":
			f.Host = value
		case ok && key == "peer" && f.Peer == "":
			f.Peer = value
		case !ok && w == "waited" && !f.Waited:
			f.Waited = true
		case !ok && f.Sniff == SniffNone && sniffOf(w) != SniffNone:
			f.Sniff = sniffOf(w)
		default:
			return fail("%q is unknown here, or there twice (sniff words: http10 http1 h2c tls opaque silent malformed)", w)
		}
	}
	return f, nil
}

func sniffOf(word string) Sniff {
	for i := 1; i < len(sniffNames); i++ {
		if sniffNames[i] == word {
			return Sniff(i)
		}
	}
	return SniffNone
}

// RequestString is a request's text form: method, authority with path, and
// fields as h:name=value. The body and the HTTP version are not in it.
//
//	GET cart:8080/items?x=1 h:version=2
//	OPTIONS cart:8080*
//	CONNECT cart:8080
//	GET cart:8080/chat upgrade=websocket
func RequestString(h *httpmsg.Head) string {
	b := appendWord(make([]byte, 0, 96), string(h.Method))
	b = append(b, ' ')
	if target := string(h.Authority) + string(h.Path); target != "" {
		b = appendWord(b, target)
	} else {
		b = append(b, `""`...)
	}
	for i := range h.Fields {
		b = appendWord(append(b, " h:"...), string(h.Fields[i].Name))
		b = appendWord(append(b, '='), string(h.Fields[i].Value))
	}
	if len(h.Upgrade) > 0 {
		b = appendWord(append(b, " upgrade="...), string(h.Upgrade))
	}
	return string(b)
}

const requestForm = `the form is: METHOD authority/path [h:name=value]... [upgrade=token]`

// ParseRequest reads what RequestString writes. The scheme is http, the minor
// version 1, the length 0; field names are lower-cased.
func ParseRequest(text string) (httpmsg.Head, error) {
	fail := func(format string, args ...any) (httpmsg.Head, error) {
		return httpmsg.Head{}, fmt.Errorf("request %q: %s; %s", text, fmt.Sprintf(format, args...), requestForm)
	}
	words, err := splitWords(text)
	if err != nil {
		return fail("%v", err)
	}
	if len(words) < 2 {
		return fail("method and target are needed")
	}
	h := httpmsg.Head{Scheme: []byte("http"), Minor: 1}
	method, err := unword(words[0])
	if err != nil {
		return fail("%v", err)
	}
	if !token(method) {
		return fail("%q is no method", method)
	}
	h.Method = []byte(method)
	target, err := unword(words[1])
	if err != nil {
		return fail("%v", err)
	}
	switch i := strings.IndexByte(target, '/'); {
	case i >= 0:
		h.Authority, h.Path = []byte(target[:i]), []byte(target[i:])
	case strings.HasSuffix(target, "*"):
		h.Authority, h.Path = []byte(target[:len(target)-1]), []byte("*")
	default:
		h.Authority = []byte(target)
	}
	for _, w := range words[2:] {
		if v, ok := strings.CutPrefix(w, "upgrade="); ok && h.Upgrade == nil {
			up, err := unword(v)
			if err != nil || up == "" {
				return fail("%q names no protocol", w)
			}
			h.Upgrade = []byte(up)
			continue
		}
		field, ok := strings.CutPrefix(w, "h:")
		name, value, has := strings.Cut(field, "=")
		if !ok || !has {
			return fail("%q is unknown here", w)
		}
		if value, err = unword(value); err != nil {
			return fail("%v", err)
		}
		if !token(name) || !httpmsg.ValidValue([]byte(value)) {
			return fail("%q is no field", w)
		}
		h.Fields = append(h.Fields, httpmsg.Field{Name: []byte(strings.ToLower(name)), Value: []byte(value)})
	}
	return h, nil
}

func token(s string) bool {
	for i := range len(s) {
		if httpmsg.Lower[s[i]] == 0 {
			return false
		}
	}
	return s != ""
}

// appendWord appends s, quoted if it could not be read back as it is.
func appendWord(b []byte, s string) []byte {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f || s[i] == '"' || s[i] == '\\' {
			return strconv.AppendQuote(b, s)
		}
	}
	return append(b, s...)
}

// unword undoes appendWord.
func unword(w string) (string, error) {
	if !strings.HasPrefix(w, `"`) {
		if strings.Contains(w, `"`) {
			return "", fmt.Errorf("a quote inside %s", w)
		}
		return w, nil
	}
	s, err := strconv.Unquote(w)
	if err != nil {
		return "", fmt.Errorf("%s is not quoted as a Go string", w)
	}
	return s, nil
}

// cutUnquoted splits a word of two parts, each perhaps quoted, at sep.
func cutUnquoted(w string, sep byte) (before, after string, found bool, err error) {
	i := strings.IndexByte(w, sep)
	if strings.HasPrefix(w, `"`) {
		q, err := strconv.QuotedPrefix(w)
		if err != nil {
			return "", "", false, fmt.Errorf("%s is not quoted as a Go string", w)
		}
		i = len(q)
		if i < len(w) && w[i] != sep {
			return "", "", false, fmt.Errorf("%q after the quote in %s", w[i], w)
		}
	}
	if i < 0 || i >= len(w) {
		before, err = unword(w)
		return before, "", false, err
	}
	if before, err = unword(w[:i]); err != nil {
		return "", "", false, err
	}
	after, err = unword(w[i+1:])
	return before, after, true, err
}

// splitWords splits at spaces outside of quotes.
func splitWords(text string) ([]string, error) {
	var words []string
	for {
		text = strings.TrimLeft(text, " \t")
		if text == "" {
			return words, nil
		}
		i := 0
		for i < len(text) && text[i] != ' ' && text[i] != '\t' {
			if text[i] != '"' {
				i++
				continue
			}
			q, err := strconv.QuotedPrefix(text[i:])
			if err != nil {
				return nil, errors.New("a quote that does not end")
			}
			i += len(q)
		}
		words = append(words, text[:i])
		text = text[i:]
	}
}
