package authz

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// The bounds of an answer; one that is larger is no answer.
const (
	// MaxAnswer bounds in bytes the whole of it: a denial's body with its fields.
	MaxAnswer = 64 << 10
	// MaxEdits is how many changes it may ask for.
	MaxEdits = 128
	// maxDepth is how many messages may stand inside each other, as at protobuf's own
	// readers: a Struct may hold another.
	maxDepth = 100
)

// Field numbers of the answer, by message.
const (
	// envoy.service.auth.v3.CheckResponse
	checkStatus number = 1
	checkDenied number = 2 // oneof http_response
	checkOK     number = 3
	checkError  number = 5 // a DeniedHttpResponse

	// google.rpc.Status
	statusCode number = 1 // int32, google.rpc.Code

	// envoy.service.auth.v3.DeniedHttpResponse
	deniedStatus  number = 1
	deniedHeaders number = 2
	deniedBody    number = 3

	// envoy.type.v3.HttpStatus
	httpStatusCode number = 1 // enum whose values are the statuses

	// envoy.service.auth.v3.OkHttpResponse
	okHeaders         number = 2
	okHeadersToRemove number = 5
	okResponseHeaders number = 6
	okQueryToSet      number = 7
	okQueryToRemove   number = 8

	// envoy.config.core.v3.HeaderValueOption
	optionHeader number = 1
	optionAppend number = 2 // google.protobuf.BoolValue
	optionAction number = 3 // enum

	// envoy.config.core.v3.HeaderValue, and QueryParameter
	headerKey      number = 1
	headerValue    number = 2
	headerRawValue number = 3

	// google.protobuf.BoolValue
	boolValue number = 1
)

// Answer is what the service said of one question.
type Answer struct {
	// Allowed: the request may go on, with Request and Query done to it and
	// Response to the answer that it gets.
	Allowed bool

	// Status and Body of a denial, and in Response its fields. 0: 403 (Envoy's default).
	Status int
	Body   []byte

	Request  []snapshot.Op
	Query    []snapshot.Op
	Response []snapshot.Op

	// Ignored is how many changes were left out, for they concern what is not the
	// service's to say: the route, the framing, and what only a proxy says.
	Ignored int
}

// ErrFailed: the service says that it could not judge (CheckResponse.error_response).
var ErrFailed = errors.New("authz: the service answers that it could not judge the request")

// Parse reads an envoy.service.auth.v3.CheckResponse. The answer keeps slices of b.
//
// An error means that nobody was asked, as it were: what is malformed, too large,
// holds bytes that no field may hold, or writes a known field as another kind of value
// is no answer, and the request has to be refused.
//
// As Envoy has it a status of OK allows, and it is OK where none stands there.
// Dynamic metadata has no reader here and is skipped.
func Parse(b []byte) (Answer, error) {
	if len(b) > MaxAnswer {
		return Answer{}, fmt.Errorf("authz: an answer of %d bytes; at most %d are read", len(b), MaxAnswer)
	}
	var a Answer
	var code uint64
	var ok, denied []byte // the last kind counts, as in any oneof, and of it all that was written
	failed := false
	err := checked(b, checkMessage, 0)
	if err != nil {
		return Answer{}, err
	}
	err = fields(b, func(num number, v []byte, n uint64) error {
		switch num {
		case checkStatus:
			return fields(v, func(num number, _ []byte, n uint64) error {
				if num == statusCode {
					code = n
				}
				return nil
			})
		case checkDenied:
			denied, ok, failed = merged(denied, v), nil, false
		case checkOK:
			denied, ok, failed = nil, merged(ok, v), false
		case checkError:
			denied, ok, failed = nil, nil, true
		}
		return nil
	})
	switch {
	case err != nil:
	case failed:
		err = ErrFailed
	case code == 0:
		a.Allowed = true
		err = a.readOK(ok)
	default:
		err = a.readDenied(denied)
	}
	if err == nil && len(a.Request)+len(a.Response)+len(a.Query) > MaxEdits {
		err = fmt.Errorf("authz: an answer of more than %d changes", MaxEdits)
	}
	if err != nil {
		return Answer{}, err
	}
	return a, nil
}

// merged is a message that was written in two parts, as protobuf's readers take one: a is what came before, or nil.
func merged(a, b []byte) []byte {
	if len(a) == 0 {
		return slices.Clip(b) // so that a further part is not written into what is read
	}
	return append(a, b...)
}

func (a *Answer) readOK(b []byte) error {
	var remove, removeQuery []snapshot.Op // come last, wherever they stand
	err := fields(b, func(num number, v []byte, _ uint64) error {
		switch num {
		case okHeaders:
			return a.header(&a.Request, v)
		case okResponseHeaders:
			return a.header(&a.Response, v)
		case okHeadersToRemove:
			return a.edit(&remove, model.RemoveAll, v, nil)
		case okQueryToSet:
			var key, value []byte
			err := fields(v, func(num number, v []byte, _ uint64) error {
				switch num {
				case headerKey:
					key = v
				case headerValue:
					value = v
				}
				return nil
			})
			a.Query = append(a.Query, snapshot.Op{Kind: model.OverwriteIfExistsOrAdd, Name: key, Value: value})
			return err
		case okQueryToRemove:
			removeQuery = append(removeQuery, snapshot.Op{Kind: model.RemoveAll, Name: v})
		}
		return nil
	})
	a.Request, a.Query = append(a.Request, remove...), append(a.Query, removeQuery...)
	return err
}

func (a *Answer) readDenied(b []byte) error {
	return fields(b, func(num number, v []byte, _ uint64) error {
		switch num {
		case deniedStatus:
			return fields(v, func(num number, _ []byte, n uint64) error {
				if num == httpStatusCode {
					a.Status = 0
					if n >= 200 && n <= 599 {
						a.Status = int(n)
					}
				}
				return nil
			})
		case deniedHeaders:
			return a.header(&a.Response, v)
		case deniedBody:
			a.Body = v
		}
		return nil
	})
}

// header reads a HeaderValueOption. Where neither append nor another action is said
// the field is overwritten: the messages of the service say so of append.
func (a *Answer) header(to *[]snapshot.Op, b []byte) error {
	var name, value, raw []byte
	var action uint64
	appends := false
	err := fields(b, func(num number, v []byte, n uint64) error {
		switch num {
		case optionHeader:
			return fields(v, func(num number, v []byte, _ uint64) error {
				switch num {
				case headerKey:
					name = v
				case headerValue:
					value = v
				case headerRawValue:
					raw = v
				}
				return nil
			})
		case optionAppend:
			return fields(v, func(num number, _ []byte, n uint64) error {
				if num == boolValue {
					appends = n != 0
				}
				return nil
			})
		case optionAction:
			action = n
		}
		return nil
	})
	if err != nil {
		return err
	}
	if len(raw) > 0 {
		value = raw
	}
	kind := model.OverwriteIfExistsOrAdd
	switch {
	case appends:
		kind = model.AppendIfExistsOrAdd
	case action == 1:
		kind = model.AddIfAbsent
	case action == 3:
		kind = model.OverwriteIfExists
	}
	return a.edit(to, kind, name, value)
}

// edit adds one change of a field, if it is the service's to ask for.
func (a *Answer) edit(to *[]snapshot.Op, kind model.MutationKind, name, value []byte) error {
	switch {
	case len(name) == 0:
		return errors.New("authz: the answer has a field without a name")
	case !httpmsg.ValidValue(value):
		return fmt.Errorf("authz: the answer has a field %.40q whose value holds bytes that none may hold", name)
	}
	low := make([]byte, len(name))
	for i, c := range name {
		if low[i] = httpmsg.Lower[c]; low[i] == 0 {
			if name[0] == ':' {
				a.Ignored++ // the route has been chosen
				return nil
			}
			return fmt.Errorf("authz: the answer has a field named %.40q, which is no name", name)
		}
	}
	if reserved(string(low)) {
		a.Ignored++
		return nil
	}
	*to = append(*to, snapshot.Op{Kind: kind, Name: low, Value: trim(value)})
	return nil
}

// reserved reports whether a field is none that the service may change: it frames the
// message, names the destination, or says what only a proxy may say (contract 5.7, 5.9,
// 5.10), in any spelling that an application may take for it (httpmsg.ProxyOnly).
func reserved(name string) bool {
	name = strings.ReplaceAll(name, "_", "-")
	switch name {
	case "host", "connection", "keep-alive", "proxy-connection", "transfer-encoding", "content-length", "upgrade", "te", "trailer", "expect":
		return true
	}
	return httpmsg.ProxyOnlyTrailer([]byte(name)) // no x-aether-* field, either
}

// trim removes the blanks around a value, which are not part of it (RFC 9110 5.5).
func trim(v []byte) []byte {
	for len(v) > 0 && (v[0] == ' ' || v[0] == '\t') {
		v = v[1:]
	}
	for n := len(v); n > 0 && (v[n-1] == ' ' || v[n-1] == '\t'); n = len(v) {
		v = v[:n-1]
	}
	return v
}

var errWire = errors.New("authz: the answer is no protobuf message of the kind that was asked for")

// A kind is how the value of a field is written.
type kind uint8

const (
	kindUnknown kind = iota // not in the message as it is known here: skipped
	kindInt                 // int32, or an enum
	kindBool
	kindDouble
	kindText  // string, which is UTF-8
	kindBytes // bytes
	kindMessage
)

// message is the shape of one kind of message: its fields, by number. Fields that
// nobody reads are in it too, for whether they are well-formed decides whether there
// is an answer, at protobuf's own readers as here.
type message struct{ fields [9]field }

type field struct {
	kind kind
	of   *message // of a kindMessage
}

var (
	textField  = field{kind: kindText}
	bytesField = field{kind: kindBytes}
	intField   = field{kind: kindInt}
	boolField  = field{kind: kindBool}
)

func fieldOf(m *message) field { return field{kindMessage, m} }

// The messages of an answer. Struct and Value contain each other: see init.
var (
	structMessage = &message{} // google.protobuf.Struct
	valueMessage  = &message{} // google.protobuf.Value

	anyMessage        = &message{[9]field{1: textField, 2: bytesField}}
	rpcStatusMessage  = &message{[9]field{statusCode: intField, 2: textField, 3: fieldOf(anyMessage)}}
	httpStatusMessage = &message{[9]field{httpStatusCode: intField}}
	boolMessage       = &message{[9]field{boolValue: boolField}}
	headerMessage     = &message{[9]field{headerKey: textField, headerValue: textField, headerRawValue: bytesField}}
	queryMessage      = &message{[9]field{headerKey: textField, headerValue: textField}}
	optionMessage     = &message{[9]field{optionHeader: fieldOf(headerMessage), optionAppend: fieldOf(boolMessage), optionAction: intField, 4: boolField}}
	deniedMessage     = &message{[9]field{deniedStatus: fieldOf(httpStatusMessage), deniedHeaders: fieldOf(optionMessage), deniedBody: textField}}
	okMessage         = &message{[9]field{okHeaders: fieldOf(optionMessage), 3: fieldOf(structMessage), okHeadersToRemove: textField,
		okResponseHeaders: fieldOf(optionMessage), okQueryToSet: fieldOf(queryMessage), okQueryToRemove: textField}}
	checkMessage = &message{[9]field{checkStatus: fieldOf(rpcStatusMessage), checkDenied: fieldOf(deniedMessage), checkOK: fieldOf(okMessage),
		4: fieldOf(structMessage), checkError: fieldOf(deniedMessage)}}
)

func init() {
	entry := &message{[9]field{1: textField, 2: fieldOf(valueMessage)}} // of map<string, Value>
	list := &message{[9]field{1: fieldOf(valueMessage)}}
	structMessage.fields[1] = fieldOf(entry)
	valueMessage.fields = [9]field{1: intField, 2: {kind: kindDouble}, 3: textField, 4: boolField, 5: fieldOf(structMessage), 6: fieldOf(list)}
}

// checked walks b as a message of the shape m, with all that is in it.
//
// A field of m that is written as another kind of value, a number that its type does
// not hold and text that is not UTF-8 are errors. Protobuf's readers skip the first
// and cut the second: neither is what the service meant. Fields that m does not have
// are skipped.
func checked(b []byte, m *message, depth int) error {
	if depth > maxDepth {
		return errWire
	}
	for len(b) > 0 {
		num, wire, v, n, k := consume(b)
		if k < 0 {
			return errWire
		}
		b = b[k:]
		if int(num) >= len(m.fields) {
			continue
		}
		is := m.fields[num]
		if !is.holds(wire, v, n) {
			return errWire
		}
		if is.kind == kindMessage {
			if err := checked(v, is.of, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// consume reads the field that b begins with: v is the content of one that has a
// length, n a number, k how many bytes it is long, or negative where b is malformed.
func consume(b []byte) (num number, wire protowire.Type, v []byte, n uint64, k int) {
	num, wire, tag := protowire.ConsumeTag(b)
	if tag < 0 || num > protowire.MaxValidNumber {
		return 0, 0, nil, 0, -1
	}
	switch b = b[tag:]; wire {
	case protowire.BytesType:
		v, k = protowire.ConsumeBytes(b)
	case protowire.VarintType:
		n, k = protowire.ConsumeVarint(b)
	default:
		k = protowire.ConsumeFieldValue(num, wire, b)
	}
	if k < 0 {
		return 0, 0, nil, 0, k
	}
	return num, wire, v, n, tag + k
}

// holds reports whether a value, as it was read, is one of the field.
func (is field) holds(wire protowire.Type, v []byte, n uint64) bool {
	switch is.kind {
	case kindInt:
		return wire == protowire.VarintType && int64(n) == int64(int32(n))
	case kindBool:
		return wire == protowire.VarintType
	case kindDouble:
		return wire == protowire.Fixed64Type
	case kindText:
		return wire == protowire.BytesType && utf8.Valid(v)
	case kindBytes, kindMessage:
		return wire == protowire.BytesType
	}
	return true
}

// fields calls f with each field of a message that was checked: v the content of one
// that has a length, n a number.
func fields(b []byte, f func(num number, v []byte, n uint64) error) error {
	for len(b) > 0 {
		num, _, v, n, k := consume(b)
		if k < 0 {
			return errWire
		}
		b = b[k:]
		if err := f(num, v, n); err != nil {
			return err
		}
	}
	return nil
}
