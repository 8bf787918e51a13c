// Parses PTX text into a Program.
#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "ptx.h"

namespace executor {
namespace {

std::string trim(const std::string& s) {
  size_t a = s.find_first_not_of(" \t\r"), b = s.find_last_not_of(" \t\r");
  return a == std::string::npos ? "" : s.substr(a, b - a + 1);
}

bool starts_with(const std::string& s, const char* prefix) { return s.compare(0, strlen(prefix), prefix) == 0; }

std::optional<uint64_t> literal(const std::string& s) {
  try {
    size_t used = 0;
    uint64_t value;
    if (starts_with(s, "0f") || starts_with(s, "0F") || starts_with(s, "0d") || starts_with(s, "0D")) {
      value = std::stoull(s.substr(2), &used, 16), used += 2;
    } else if (starts_with(s, "-")) {
      value = -std::stoull(s.substr(1), &used, 0), used += 1;
    } else {
      value = std::stoull(s, &used, 0);
    }
    if (s.size() > used && s.substr(used) == "U") used++;
    return used == s.size() ? std::optional(value) : std::nullopt;
  } catch (const std::logic_error&) {
    return std::nullopt;
  }
}

// Returns the operands of a statement. Groups in braces and pairs d|p are flattened; addresses in brackets stay whole.
struct Parts {
  std::vector<std::string> operands;
  int groups = 0;
  bool first_is_group = false, pair = false;
};

Parts split_operands(const std::string& text) {
  Parts parts;
  std::string current;
  int brackets = 0;
  auto flush = [&] {
    if (!trim(current).empty()) parts.operands.push_back(trim(current));
    current.clear();
  };
  for (char c : text) {
    if (c == '{') parts.first_is_group |= parts.operands.empty() && trim(current).empty(), parts.groups++;
    else if (c == '}') continue;
    else if ((c == ',' || c == '|') && !brackets) parts.pair |= c == '|', flush();
    else brackets += (c == '[') - (c == ']'), current += c;
  }
  flush();
  return parts;
}

// Returns the spelling under which an opcode is defined: without cache hints, which change no value, and with a mark if
// braces distinguish two forms of an opcode.
std::string spelling(std::string opcode, const Parts& parts) {
  for (const char* hint :
       {".nc", ".L1::evict_last", ".L1::evict_first", ".L1::no_allocate", ".L2::128B", ".relaxed", ".gpu", ".weak"}) {
    size_t at = opcode.find(hint);
    if (at != std::string::npos) opcode.erase(at, strlen(hint));
  }
  if (starts_with(opcode, "mov.") && parts.groups) opcode += parts.first_is_group ? " unpack" : " pack";
  if (parts.pair) opcode += " pair";
  if (starts_with(opcode, "wgmma.mma")) opcode += parts.groups == 2 ? " registers" : " shared";
  return opcode;
}

int register_bytes(const std::string& type) {
  auto ends = [&](const char* bits) { return type.size() > 2 && type.compare(type.size() - 2, 2, bits) == 0; };
  if (type == ".pred") return 1;
  return ends("16") ? 2 : ends("32") ? 4 : ends("64") ? 8 : throw Error("unknown type " + type);
}

class Parser {
 public:
  Parser(int arch, const std::string& kernel) : arch_(arch), wanted_(kernel) {}

  Program run(const std::string& text) {
    read_files(text);
    std::istringstream in(text);
    std::string line;
    while (place_ != Place::done && std::getline(in, line)) {
      line_++;
      try {
        read_line(line);
      } catch (const Error& e) {
        throw Error("line " + std::to_string(line_) + ": " + e.what() + " in '" + trim(line).substr(0, 120) + "'");
      }
    }
    if (program_.name.empty())
      throw Error(wanted_.empty() ? "no .entry: not the PTX of a kernel" : "no .entry " + wanted_);
    if (!versioned_) throw Error("no .version and .target");
    resolve();
    return std::move(program_);
  }

 private:
  // .file 1 "csrc/decode.cu", which comes after the code that refers to it
  void read_files(const std::string& text) {
    for (size_t at = 0; (at = text.find("\n\t.file\t", at)) != std::string::npos; at++) {
      const std::string line = text.substr(at + 8, text.find('\n', at + 1) - at - 8);
      const size_t open = line.find('"'), close = line.rfind('"'), slash = line.rfind('/');
      if (open == close) continue;
      files_[atoi(line.c_str())] = line.substr(slash == std::string::npos ? open + 1 : slash + 1, close - slash - 1);
    }
  }

  void read_line(std::string line) {
    if (size_t at = line.find(".loc\t"); at != std::string::npos) return read_location(line, at + 5);
    if (size_t at = line.find("//"); at != std::string::npos) line.erase(at);
    line = trim(line);
    if (line.empty()) return;
    if (place_ == Place::module) return read_module(line);
    if (place_ == Place::header) return read_header(line);
    if (place_ == Place::other) {
      if (line == "}") place_ = Place::module;
      return;
    }
    read_body(line);
  }

  // .loc 1 114 0 // decode.py:114:0 @[ ... ]   from Triton;   .loc 2 56 3, function_name ...   from nvcc
  void read_location(const std::string& line, size_t from) {
    if (size_t at = line.find("// "); at != std::string::npos) {
      source_ = line.substr(at + 3);
      source_ = source_.substr(0, source_.find(' '));
    } else {
      int file = 0, row = 0;
      if (sscanf(line.c_str() + from, "%d %d", &file, &row) == 2 && row)
        source_ = files_[file] + ":" + std::to_string(row);
    }
  }

  void read_module(const std::string& line) {
    if (starts_with(line, ".version")) {
      double version = std::stod(line.substr(8));
      if (version < 7 || version >= 10) throw Error("PTX version outside 7.0 to 9.x");
      versioned_ = true;
    } else if (starts_with(line, ".target")) {
      const size_t name = line.find("sm_");
      const int target = atoi(line.c_str() + name + 3);
      if (target < 80 || target > 121) throw Error("compiled for a target outside sm_80 to sm_121");
      if (target > arch_) throw Error("compiled for a newer device than sm_" + std::to_string(arch_));
      if (target != arch_ && line.find_first_of("af", name) != std::string::npos)
        throw Error("compiled only for sm_" + std::to_string(target) + ", this is sm_" + std::to_string(arch_));
    } else if (size_t entry = line.find(".entry "); entry != std::string::npos) {
      const std::string name = trim(line.substr(entry + 7, line.find('(') - entry - 7));
      place_ = wanted_.empty() || name == wanted_ ? Place::header : Place::other;
      if (place_ == Place::header) program_.name = name;
    } else if (line.find(".shared ") != std::string::npos) {
      read_shared(line);
    }
  }

  // .extern .shared .align 16 .b8 global_smem[];   or   .shared .align 4 .b8 sums[128];
  void read_shared(const std::string& line) {
    const size_t open = line.find('['), name = line.find_last_of(" \t", open) + 1, align = line.find(".align ");
    if (open == std::string::npos || line.find(".b8") == std::string::npos)
      throw Error("shared memory: expected an array of bytes");
    const std::string symbol = line.substr(name, open - name);
    if (starts_with(line, ".extern")) {
      dynamic_shared_.insert(symbol);
      return;
    }
    const uint32_t to = align == std::string::npos ? 1 : atoi(line.c_str() + align + 7);
    symbols_[symbol] = {4, SHARED_BASE + allocate_shared(to, atoi(line.c_str() + open + 1))};
  }

  uint32_t allocate_shared(uint32_t align, uint32_t bytes) {
    uint32_t& end = program_.static_shared_bytes;
    const uint32_t from = (end + align - 1) / align * align;
    end = from + bytes;
    return from;
  }

  void read_header(const std::string& line) {
    if (starts_with(line, ".param")) read_parameter(line);
    if (starts_with(line, ".reqntid")) program_.threads = atoi(line.c_str() + 9);
    if (starts_with(line, ".maxntid")) program_.max_threads = atoi(line.c_str() + 9);
    if (line == "{") place_ = Place::body, scopes_.assign(1, {});
  }

  // .param .u64 .ptr .global .align 1 kernel_param_0,   or   .param .align 8 .b8 kernel_param_0[312]
  void read_parameter(const std::string& line) {
    const size_t from = line.find_last_of(" \t") + 1, end = std::min(line.find_first_of("[,", from), line.size());
    std::istringstream words(line.substr(0, from));
    int bytes = 0, align = 0;
    for (std::string word; words >> word;) {
      if (word == ".align") words >> align;
      else if (word == ".u8" || word == ".s8" || word == ".b8") bytes = 1;
      else if (word[0] == '.' && word.find_first_of("12346") == 2) bytes = register_bytes(word);
    }
    if (!bytes) throw Error("a parameter of unknown type");
    if (end < line.size() && line[end] == '[') bytes *= atoi(line.c_str() + end + 1);
    else align = bytes;
    parameter_end_ = (parameter_end_ + align - 1) / align * align;
    program_.parameters.push_back({parameter_end_, bytes});
    symbols_[line.substr(from, end - from)] = {8, PARAMETER_BASE + parameter_end_};
    parameter_end_ += bytes;
  }

  // Statements end with a semicolon. Braces between statements are scopes; braces inside a statement group operands.
  void read_body(const std::string& line) {
    for (char c : line + " ") {
      if (!statement_.empty()) {
        if (c == ';') statement(trim(std::exchange(statement_, "")));
        else if (c == ':' && statement_[0] == '$') read_label(trim(std::exchange(statement_, "")));
        else statement_ += c;
      } else if (c == '{') {
        scopes_.emplace_back();
      } else if (c == '}') {
        scopes_.pop_back();
        if (scopes_.empty()) place_ = Place::done;
      } else if (c != ' ' && c != '\t') {
        statement_ = c, statement_line_ = line_;
      }
    }
  }

  void read_label(const std::string& name) { labels_[name] = program_.code.size(); }

  // .reg .b32 %r<1591>;   or   .reg .f16 low, high;
  void declare(const std::string& line) {
    const size_t type = line.find('.', 1), names = line.find_first_of(" \t", type);
    const int bytes = register_bytes(line.substr(type, names - type));
    for (const std::string& name : split_operands(line.substr(names)).operands)
      scopes_.back().widths[name.substr(0, name.find('<'))] = bytes;
  }

  int new_slot(int bytes) {
    int slot = program_.slots;
    program_.slots += bytes == 8 ? 2 : 1;
    return slot;
  }

  Operand constant(int bytes, uint64_t value) {
    auto [it, fresh] = constants_.insert({{bytes, value}, 0});
    if (fresh) it->second = new_slot(bytes), program_.constants.push_back({it->second, bytes, value});
    return {it->second, bytes, 0};
  }

  Operand special(const std::string& name) {
    auto [it, fresh] = program_.special.insert({name, 0});
    if (fresh) it->second = new_slot(4);
    return {it->second, 4, 0};
  }

  Operand register_named(const std::string& name) {
    const std::string family = name.substr(0, name[0] == '%' ? name.find_last_not_of("0123456789") + 1 : name.size());
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      auto width = scope->widths.find(name);
      if (width == scope->widths.end()) width = scope->widths.find(family);
      if (width == scope->widths.end()) continue;
      auto [it, fresh] = scope->registers.insert({name, 0});
      if (fresh) it->second = new_slot(width->second);
      return {it->second, width->second, 0};
    }
    throw Error("unknown operand " + name);
  }

  Operand value(const std::string& text, int bytes) {
    if (text == "_") return {new_slot(bytes), bytes, 0};  // an unused result
    if (auto symbol = symbols_.find(text); symbol != symbols_.end())
      return constant(symbol->second.first, symbol->second.second);
    if (dynamic_shared_.count(text)) return constant(4, SHARED_BASE + allocate_shared(16, 0));
    if (text[0] == '%' && (text.find('.') != std::string::npos || text == "%laneid")) return special(text);
    auto number = literal(text);
    if (!number) return register_named(text);
    return constant(bytes, bytes == 1 ? (*number ? ALL_LANES : 0) : *number);
  }

  Operand address(const std::string& text, int bytes) {  // [ %rd2 + 16 ]
    if (text[0] != '[') throw Error("expected an address, got " + text);
    std::string base = trim(text.substr(1, text.size() - 2));
    int64_t offset = 0;
    if (size_t plus = base.find('+'); plus != std::string::npos) {
      offset = static_cast<int64_t>(literal(trim(base.substr(plus + 1))).value());
      base = trim(base.substr(0, plus));
    }
    Operand operand = value(base, bytes);
    operand.offset = offset;
    return operand;
  }

  static int width_of(char kind) {
    return kind == 's' || kind == 'w' || kind == 'f' ? 4
           : kind == 'g' || kind == 'P'              ? 8
           : kind == 'p'                             ? 1
           : kind == 'h'                             ? 2
                                                     : kind - '0';
  }

  Operand parse_operand(char kind, const std::string& text) {
    Operand operand;
    switch (kind) {
      case 'i':
        if (auto number = literal(text)) return {-1, 0, static_cast<int64_t>(*number)};
        throw Error("expected an integer, got " + text);
      case 's':
      case 'g':
      case 'P':
        operand = address(text, kind == 's' ? 4 : 8);
        break;
      default:
        operand = value(text, width_of(kind));
    }
    if ((kind == 'h' && operand.bytes >= 2) || (kind == 'f' && operand.bytes >= 4)) return operand;
    const int expected = width_of(kind);
    if (operand.bytes != expected)
      throw Error("operand " + text + " has " + std::to_string(operand.bytes) + " bytes, expected " +
                  std::to_string(expected));
    return operand;
  }

  void statement(std::string s) {
    if (starts_with(s, ".reg")) return declare(s);
    if (starts_with(s, ".shared")) return read_shared(s);
    if (starts_with(s, ".pragma")) return;
    if (s[0] == '.') throw Error("a declaration that the executor does not know");
    Instruction i;
    i.line = statement_line_, i.text = s, i.source = source_;
    if (s[0] == '@') {
      size_t end = s.find_first_of(" \t");
      i.negated = s[1] == '!';
      i.guard = register_named(s.substr(1 + i.negated, end - 1 - i.negated)).slot;
      s = trim(s.substr(end));
    }
    size_t end = s.find_first_of(" \t");
    Parts parts = split_operands(end == std::string::npos ? "" : s.substr(end));
    i.opcode = spelling(s.substr(0, end), parts);
    const Definition* definition = find_definition(i.opcode);
    if (!definition) {
      unknown_.push_back(i.opcode + " (line " + std::to_string(i.line) + ")");
      return;
    }
    const bool narrow = narrows(i.opcode, parts);
    if (narrow) definition = find_definition(i.opcode + " of 8");
    if (!definition) throw Error("this conversion of a wider register is not modelled");
    fill(i, *definition, parts.operands, narrow || starts_with(i.opcode, "cvt.u32.u64"));
    program_.uses_wgmma |= starts_with(i.opcode, "wgmma.mma");
    program_.code.push_back(std::move(i));
  }

  // cvt.s64.s32 %rd1, %rd2 takes the low half of the wider register.
  bool narrows(const std::string& opcode, const Parts& parts) {
    return starts_with(opcode, "cvt.") && parts.operands.size() == 2 && parts.operands[1][0] == '%' &&
           opcode.find("64", opcode.rfind('.')) == std::string::npos && register_named(parts.operands[1]).bytes == 8;
  }

  // Whether prmt takes a byte of its first (0) or second (1) source. If it takes none, LLVM passes an undefined source.
  static bool selects_from(const std::string& selector, size_t source) {
    const auto digits = literal(selector);
    if (!digits) return true;
    bool any = false;
    for (int n = 0; n < 4; n++) any |= (*digits >> (4 * n + 2) & 1) == source;
    return any;
  }

  // low: only the low half of the second operand is used.
  void fill(Instruction& i, const Definition& definition, const std::vector<std::string>& texts, bool low) {
    i.run = definition.run, i.control = definition.control, i.collective = definition.collective;
    const bool meets = starts_with(i.opcode, "shfl") || starts_with(i.opcode, "redux");
    const bool halves = i.opcode == "mov.b64 pack" || i.opcode == "mov.b64 unpack" || i.opcode.ends_with(".f32x2");
    i.spread = starts_with(i.opcode, "selp") ? Spread::select
               : meets                       ? Spread::shuffle
               : halves                      ? Spread::halves
                                             : Spread::lane;
    i.bits = bits_of(i.opcode);
    // Instructions may use undefined values if the values do not reach memory, an address, the predicate of a branch or
    // a matrix.
    const bool uses = starts_with(i.opcode, "st") || starts_with(i.opcode, "mma") || starts_with(i.opcode, "cp.") ||
                      starts_with(i.opcode, "wgmma");
    size_t most = definition.operands.size();
    if (texts.size() > most || texts.size() < std::min(most, definition.required))
      throw Error("expected " + std::to_string(most) + " operands, got " + std::to_string(texts.size()));
    for (size_t n = 0; n < texts.size(); n++) {
      if (definition.operands[n] == 'L') {
        branches_.push_back({program_.code.size(), texts[n]});
        continue;
      }
      Operand operand = parse_operand(definition.operands[n], texts[n]);
      i.operands.push_back(operand);
      const char kind = definition.operands[n];
      if (operand.slot < 0 || kind == 'w') continue;
      if (i.opcode == "prmt.b32" && (n == 1 || n == 2) && !selects_from(texts[3], n - 1)) continue;
      auto& slots = n < static_cast<size_t>(definition.outputs)       ? i.writes
                    : uses || kind == 's' || kind == 'g' || kind == 'P' ? i.checked
                                                                        : i.reads;
      slots.push_back(operand.slot);
      if (operand.bytes == 8 && !(low && n == 1)) slots.push_back(operand.slot + 1);
    }
  }

  void resolve() {
    if (!unknown_.empty()) {
      std::sort(unknown_.begin(), unknown_.end());
      for (const std::string& name : unknown_)
        if (starts_with(name, "tcgen05")) throw Error("tensor memory of sm_100 is not modelled: " + name);
      std::string names;
      for (size_t n = 0; n < unknown_.size() && n < 8; n++) names += (n ? ", " : "") + unknown_[n];
      throw Error("unknown instruction: " + names);
    }
    if (place_ != Place::done) throw Error("the text ends before the kernel does");
    for (auto& [at, label] : branches_) {
      if (!labels_.count(label)) throw Error("no label " + label);
      program_.code[at].target = labels_[label];
    }
  }

  enum class Place { module, other, header, body, done };  // other: a kernel that was not asked for
  struct Scope {
    std::map<std::string, int> widths, registers;  // by name, or by family of names such as %r
  };

  int arch_, line_ = 0, statement_line_ = 0, parameter_end_ = 0;
  const std::string wanted_;
  Place place_ = Place::module;
  bool versioned_ = false;
  std::string statement_, source_;
  Program program_;
  std::map<int, std::string> files_;
  std::vector<Scope> scopes_;
  std::set<std::string> dynamic_shared_;
  std::map<std::string, std::pair<int, uint64_t>> symbols_;  // width and address
  std::map<std::string, size_t> labels_;
  std::map<std::pair<int, uint64_t>, int> constants_;
  std::vector<std::pair<size_t, std::string>> branches_;
  std::vector<std::string> unknown_;
};

}  // namespace

Program parse(const std::string& text, int arch, const std::string& kernel) { return Parser(arch, kernel).run(text); }

}  // namespace executor
